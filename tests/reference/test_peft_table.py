"""Tests that the table of docs/peft.md names every kind of the installed PEFT, and says what is measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

from tests.support.peft_table import (
    CASES,
    NOT_ROWS,
    Case,
    Site,
    bound_of_line,
    line_of,
    lines_of_page,
    measure,
    opened,
    starts_of,
    variants_of_lora,
)

STARTS_OF_LORA = ("LORA", "ADALORA")
"""The kinds whose configs have the setting `init_lora_weights`. AdaLoRA does not read it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened(tmp_path_factory.mktemp("peft")) as made:
        yield made


def test_every_kind_of_peft_has_a_row() -> None:
    kinds = {case.kind for case in CASES}
    assert kinds == {each.value for each in PeftType} == {each.value for each in PEFT_TYPE_TO_CONFIG_MAPPING}


def test_every_start_and_variant_has_a_row_or_a_reason() -> None:
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        rows = {case.start for case in CASES if case.kind == kind.value or kind.value in STARTS_OF_LORA}
        for start in starts_of(config):
            assert start.replace("[number of iters]", "8") in rows | NOT_ROWS.keys(), (kind.value, start)
    assert variants_of_lora() <= {case.variant for case in CASES} | NOT_ROWS.keys()


def test_the_page_has_these_rows() -> None:
    assert list(lines_of_page()) == [case.title for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_row_says_what_is_measured(case: Case, site: Site) -> None:
    line = lines_of_page()[case.title]
    bound, found = bound_of_line(line), measure(case, site)
    assert found.error is None or (bound is not None and found.error <= bound)
    assert line == line_of(case, found, bound)
