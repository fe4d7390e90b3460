"""Tests that the committed vectors are those that their script makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vectors import make_vectors

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["quantise.json", "ring.json", "frames.json", "expand.json", "packed.json"])
def test_the_script_makes_these_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_vectors, "HERE", tmp_path)
    make_vectors.main()
    assert (tmp_path / name).read_text() == (HERE / name).read_text()


def test_the_script_is_independent_of_what_it_tests() -> None:
    source = (HERE / "make_vectors.py").read_text()
    assert "import wire" not in source
    assert "from wire" not in source
    assert "torch" not in source
