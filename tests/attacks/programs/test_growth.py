"""Tests `python -m attacks.growth`: it prints and writes what it measured, and the straight line that it fits to the
measurements has the right values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attacks.adversaries.lattice_reduction import HARD_SIGMA, Growth
from attacks.programs import growth
from noise.params import PARAMETERS


def test_it_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert growth.main(["--dimensions", "8,16,24", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (series,) = json.loads((tmp_path / "growth.json").read_text())["series"]
    assert [one["dimension"] for one in series["measured"]] == [8, 16, 24]
    assert all(one["block_size"] == 2 and one["seconds"] > 0 for one in series["measured"])
    for name, chosen in PARAMETERS.items():
        bits = series["bits"][name]
        assert bits["published"] == chosen.bits
        assert (
            f"| {name} | {chosen.dimension} | {chosen.sigma:g} | {bits['on_the_line']:.0f} | {chosen.bits} |" in printed
        )


def test_the_line_is_extrapolated() -> None:
    measured = [Growth(dimension, 3.2, dimension, 2.0 ** (0.1 * dimension - 7), 2) for dimension in (10, 20, 30)]
    told = "\n".join(growth.lines(3.2, measured))
    assert "log2(seconds) = 0.100 · dimension -7.0" in told
    assert "| default | 1536 | 3.2 | 178 | 161 |" in told  # 153.6 - 7, plus 31 for operations in a second
    assert "estimates nothing" in told


def test_what_was_not_found_is_no_point(tmp_path: Path) -> None:
    measured = [Growth(8, HARD_SIGMA, 8, 1.0, 2), Growth(99, HARD_SIGMA, 99, 1.0, None)]
    told = "\n".join(growth.lines(HARD_SIGMA, measured))
    assert "| 99 | 99 | 1 | nothing up to block size 32 |" in told
    assert "No line" in told
    assert "published" not in told
    text = growth.write(tmp_path, {HARD_SIGMA: measured}).read_text()
    assert "NaN" not in text
    assert json.loads(text)["series"][0]["bits"]["default"] == {"on_the_line": None, "published": 161}


def test_one_dimension_draws_no_line() -> None:
    assert growth.main(["--dimensions", "8"]) == 1


@pytest.mark.parametrize("options", [["--dimensions", "2000"], ["--dimensions", "x"], ["--sigma", "0"]])
def test_what_cannot_be_measured_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        growth.main(options)
    assert stopped.value.code == 2


def test_the_shipped_error_is_measured_without_options() -> None:
    assert growth.SERIES[0][0] == PARAMETERS["default"].sigma
