"""Tests which parameters are refused, and that the table's numbers are unchanged."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest

from noise.params import PARAMETERS, LatticeParameters, choose
from tests.support.repository import ROOT
from wire.errors import ConfigurationError, WeakParameters

OWN = LatticeParameters("own", 256, 6, 3.2, 161, "a test")


def changed(**changes: object) -> LatticeParameters:
    return dataclasses.replace(OWN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "degree", "rank", "sigma", "bits"),
    [("default", 512, 3, 3.2, 161), ("conservative", 512, 4, 3.2, 219), ("lean", 256, 5, 32.0, 149)],
)
def test_the_shipped_sets_are_those_of_the_table(name: str, degree: int, rank: int, sigma: float, bits: int) -> None:
    chosen = choose(name)
    assert (chosen.ring_degree, chosen.rank, chosen.sigma, chosen.bits) == (degree, rank, sigma, bits)
    assert chosen.dimension == degree * rank
    assert chosen.max_secrets == 2 ** (bits - 128)
    assert not chosen.toy
    assert "lattice-estimator" in chosen.source


def test_there_are_no_other_shipped_sets_and_they_are_frozen() -> None:
    assert set(PARAMETERS) == {"default", "conservative", "lean"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        PARAMETERS["default"].sigma = 1.0  # type: ignore[misc]


def test_the_document_has_the_same_numbers() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text()
    for name, row in PARAMETERS.items():
        pattern = rf"\| `{name}` \| {row.rank}×{row.ring_degree} \| {row.dimension} \| {row.sigma:g} \| {row.bits} \|"
        assert re.search(pattern, text), name


def test_the_documents_check_comes_out_as_it_says() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.S)
    assert script is not None
    done = subprocess.run([sys.executable, "-c", script[1]], capture_output=True, text=True, check=True, timeout=60)
    lines = re.findall(r"(\d+) ([\d.]+): block size \d+, 2\^(\d+); core-SVP 2\^(\d+), quantum 2\^(\d+)", done.stdout)
    assert len(lines) == 6
    for dimension, sigma, primal, core, quantum in lines:
        row = re.search(rf"\| {dimension} \| {sigma} \| (\d+) \| {primal} \| {core} \| {quantum} \|", text)
        assert row is not None, (dimension, sigma)
        assert -1 <= int(primal) - int(row[1]) <= 3  # the table has the minimum over attacks, one of which this is


def test_the_documents_block_sizes_are_those_published_for_kyber() -> None:
    """The script in docs/parameters.md is run for Kyber's parameters. It agrees within a bit with the published
    core-SVP numbers (Kyber specification 3.02, 2021, table 4); it tries only every 16th m."""
    text = (ROOT / "docs" / "parameters.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.S)
    assert script is not None
    names: dict[str, Any] = {}
    exec(script[1].split("\nfor n, sigma in")[0], names)  # noqa: S102, our own page
    for n, variance, classical, quantum in ((512, 1.5, 118, 107), (768, 1.0, 182, 165), (1024, 1.0, 256, 232)):
        block, _ = names["block_size"](n, math.sqrt(variance), math.log2(3329), math.sqrt(variance))
        assert abs(0.292 * block - classical) <= 1
        assert abs(0.265 * block - quantum) <= 1


def test_what_many_secrets_leave_is_what_the_document_says() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text()
    rows = re.findall(r"\| `(\w+)` \| 2\^(\d+)( \(the limit\))? \| (\d+) \| (\d+) \| (\d+) \|", text)
    assert {(name, int(log_secrets)) for name, log_secrets, *_ in rows} >= {("default", 20), ("default", 33)}
    assert len(rows) == 6
    for name, log_secrets, limit, *left in rows:
        chosen, spent = PARAMETERS[name], int(log_secrets)
        models = re.search(
            rf"\| {chosen.dimension} \| {chosen.sigma:g} \| {chosen.bits} \| \d+ \| (\d+) \| (\d+) \|", text
        )
        assert models is not None
        assert [int(each) for each in left] == [chosen.bits - spent, int(models[1]) - spent, int(models[2]) - spent]
        assert 2**spent <= chosen.max_secrets
        assert bool(limit) == (2**spent == chosen.max_secrets)


def test_an_own_set_as_hard_as_a_row_is_taken() -> None:
    assert choose(OWN) is OWN
    assert choose(changed(rank=6, ring_degree=512, sigma=8.0, bits=219)).dimension == 3072


@pytest.mark.parametrize(
    "weak",
    [
        changed(rank=5),  # dimension 1280 with sigma 3.2
        changed(ring_degree=512, rank=2, sigma=256.0, bits=133),  # the table refuses this set
        changed(sigma=3.19),
        changed(sigma=0.0),
        changed(bits=162),  # this set claims more bits than its row, so it would draw too many secrets
        changed(ring_degree=128, rank=1, bits=999),
        changed(ring_degree=256, rank=5, sigma=32.0, bits=150),
    ],
)
def test_weaker_than_every_row_is_refused(weak: LatticeParameters) -> None:
    with pytest.raises(WeakParameters):
        choose(weak)
    with pytest.raises(WeakParameters):  # the caller's permission is not enough: the set must be marked as a toy
        choose(weak, allow_toy=True)
    with pytest.raises(WeakParameters):
        choose(dataclasses.replace(weak, toy=True))
    assert choose(dataclasses.replace(weak, toy=True), allow_toy=True).toy


def test_a_strong_set_marked_toy_needs_the_flag_too() -> None:
    with pytest.raises(WeakParameters, match="toy"):
        choose(changed(toy=True))
    assert choose(changed(toy=True), allow_toy=True).max_secrets == 2**62


@pytest.mark.parametrize(
    "bad",
    [
        {"ring_degree": 500}, {"ring_degree": 1}, {"ring_degree": 0}, {"ring_degree": -512}, {"ring_degree": 4096},
        {"rank": 0}, {"rank": 7}, {"sigma": float("nan")}, {"sigma": float("inf")}, {"sigma": -1.0}, {"sigma": 2000.0},
        {"bits": -1},
    ],
)  # fmt: skip
def test_numbers_that_the_arithmetic_cannot_do(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        choose(changed(toy=True, **bad), allow_toy=True)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="default, conservative, lean"):
        choose("tiny")
