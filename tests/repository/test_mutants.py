"""Tests that the list of mutants can be run: each changes one place, into code, and names tests that are there."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.support.mutants import AREAS, MUTANTS, Mutant, main
from tests.support.repository import ROOT


def test_there_are_enough_in_every_area() -> None:
    areas = Counter(mutant.area for mutant in MUTANTS)
    assert areas.total() >= 40
    assert all(areas[area] >= 4 for area in AREAS), areas
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_each_changes_one_place_into_other_code(mutant: Mutant) -> None:
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    after = mutant.applied(before)
    compile(after, mutant.path, "exec")
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))  # A changed comment would survive any test.


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_each_names_tests_that_are_there(mutant: Mutant) -> None:
    assert 1 <= len(mutant.tests) <= 2
    for test in mutant.tests:
        file, _, name = test.partition("::")
        defined = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert any(each.startswith("test_") for each in defined) if not name else name in defined


def test_a_text_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant("wire/frame.py", "a", "b", (), "")
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="exactly one place"):
            mutant.applied(text)


def test_a_number_that_no_mutant_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["0"])
    assert f"from 1 to {len(MUTANTS)}, got 0" in capsys.readouterr().err
