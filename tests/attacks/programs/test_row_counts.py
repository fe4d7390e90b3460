"""Tests hostile bundles that read text by row counts: they win against a stock tokenizer, and learn nothing through the
defences."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from attacks.programs import row_counts
from attacks.programs.row_counts import DEFENCES, NUM_SECRETS, OUT_OF_BOUNDS, STOCK, WITHIN_BOUNDS, Leak


def test_entropy() -> None:
    assert row_counts.entropy_bits([1, 1, 1, 1]) == 0
    assert row_counts.entropy_bits([1, 2, 1, 2]) == 1
    assert row_counts.entropy_bits(range(NUM_SECRETS)) == pytest.approx(math.log2(NUM_SECRETS))


def test_the_exit_status_follows_the_claims() -> None:
    def leak(bundle: str, defence: str, bits: float) -> Leak:
        return Leak(bundle, defence, "prompts", bits, refused=False)

    template = OUT_OF_BOUNDS[0]
    held = [leak(template, STOCK, 4.0), leak(template, "none", 0.0), leak(WITHIN_BOUNDS, "none", 4.0)]
    assert row_counts.is_held_off(held)
    assert not row_counts.is_held_off([leak(template, STOCK, 0.0)]), "a control that does not win proves nothing"
    assert not row_counts.is_held_off([replace(held[1], bits=0.5)])
    for defence in ("tokenizer=", "pad_rows="):
        assert not row_counts.is_held_off([leak(WITHIN_BOUNDS, defence, 0.5)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the tokenizer failed")  # that of a bundle that attacks
def test_bundles_against_tenants(tmp_path: Path) -> None:
    leaks = row_counts.measure(tmp_path)
    assert row_counts.is_held_off(leaks)
    by_key = {(leak.bundle, leak.job, leak.defence): leak for leak in leaks}
    assert len(by_key) == len(leaks) == 7 * (1 + len(DEFENCES))
    for leak in leaks:
        if leak.defence == STOCK:
            assert leak.bits > (0.9 if "fails" in leak.bundle else 2.5), "the controls were to win"
    for job in ("prompts", "training"):
        assert by_key[WITHIN_BOUNDS, job, "none"].bits > 2, "the documents say that this much is left"
    assert by_key[OUT_OF_BOUNDS[1], "prompts", "none"].refused
    table = "\n".join(row_counts.lines(leaks))
    assert "refused" in table and WITHIN_BOUNDS in table  # noqa: PT018
