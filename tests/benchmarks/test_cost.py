"""Tests the tables of docs/cost.md: they are what the command prints, and bytes agree with the product's own counts.

Times are computed from numbers that were measured elsewhere. So these tests show that page, command and product agree,
not that a machine is as fast as the page says.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from benchmarks import cost
from benchmarks.cost import BACKWARD, FORWARD, SHAPES, Assumed, Calls, Group, Link, Measured, Model, hint_bytes
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "cost.md").read_text()
MODEL = Model(Measured(), Assumed())
SMOLLM2, _, SEVEN_B, SEVENTY_B = SHAPES


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Returns the tables that the command prints, by name."""
    cost.main(arguments)
    return tables(capsys.readouterr().out)


def tables(text: str) -> dict[str, str]:
    return dict(re.findall(r"<!-- table: ([^>]+) -->\n((?:\|.*\n?)+)", text))


def of_training(calls: Calls, rows: int = 424) -> float:
    return sum(calls.message_bytes(rows)) / rows


def test_the_page_has_the_tables_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys)
    assert {name: text.strip() for name, text in tables(PAGE).items()} == {k: v.strip() for k, v in found.items()}
    assert list(found) == list(cost.TABLES)


def test_prices_follow_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    usual, free = printed(capsys), printed(capsys, "--egress-per-gb", "0")
    changed = {name for name in usual if usual[name] != free[name]}
    assert changed == {"price", "numbers"}
    assert {row.split(" | ")[3] for row in free["price"].splitlines()[2:]} == {"0"}
    twice = printed(capsys, "--confidential-gpu-per-hour", "8")["price"]
    before, after = (float(text.splitlines()[5].split(" | ")[8].strip(" |")) for text in (usual["price"], twice))
    assert after == pytest.approx(2 * before, rel=0.05)


@pytest.mark.parametrize(
    "words", [("--step-tokens", "nan"), ("--step-tokens", "0.5"), ("--gpu-per-hour", "-1"), ("--core-per-hour", "1e9")]
)
def test_a_number_that_cannot_be_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cost.main(words)
    assert refused.value.code == 2
    assert f"{words[0]} is a number from" in capsys.readouterr().err


def test_shapes_are_those_of_the_published_models() -> None:
    """Parameters in millions without norms: a head that is the embedding counts once."""
    found = [round((shape.base_weights + shape.embedding) / 1e6) for shape in SHAPES]
    assert found == [134, 1236, 6738, 70552]
    assert [len(Calls.decoding(shape).each) for shape in SHAPES] == [120, 64, 129, 321]
    assert SMOLLM2.adapter_weights == 4_884_480  # what PEFT counts for rank 16 on all linear layers


def test_bytes_are_those_of_the_plan_on_the_page_about_fine_tuning() -> None:
    """docs/finetune.md, "Adapters on upper blocks": an epoch of 7,705 tokens, as `tenant plan` counts it."""
    text = (ROOT / "docs" / "finetune.md").read_text()
    for name, adapted in (("third", 1 / 3), ("fifth", 1 / 5)):
        found = re.search(rf"\| the upper {name} \| ([\d,]+) MB \| ([\d,]+) MB", text)
        assert found is not None
        for words, cached in zip(found.groups(), (False, True), strict=True):
            counted = float(words.replace(",", "")) * 1e6 / 7705
            assert of_training(Calls.training(SMOLLM2, adapted=adapted, cached=cached)) == pytest.approx(
                counted, rel=0.02
            )


@pytest.mark.slow
def test_bytes_are_those_of_the_bill_of_the_real_model(smollm2: Path, tmp_path: Path) -> None:
    from tenant_sdk import TenantClient

    rows = [{"text": "The quick brown fox jumps over the lazy dog and runs away. " * 8}] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Replies are not checked here: nothing is computed from them.
        with TenantClient("inproc:smollm2-135m", cache=tmp_path) as client:
            bill = client.plan(rows, max_steps=2, batch_size=2)
            short, long = (client.plan_tokens(1, number, probe_s=0.1) for number in (101, 201))
    assert bill.is_exact
    calls = Calls.training(SMOLLM2)
    sent = bill.bytes_up + bill.bytes_down - bill.hint_bytes
    assert of_training(calls, bill.positions // 2) * bill.positions == pytest.approx(sent, rel=0.02)
    assert bill.hint_disk_bytes == hint_bytes(SMOLLM2, FORWARD) + hint_bytes(SMOLLM2, BACKWARD)
    decoding = Calls.decoding(SMOLLM2)  # Hints are in both plans, so the difference is that of 100 steps.
    assert long.round_trips - short.round_trips == 100 * len(decoding.each)
    more = long.bytes_up + long.bytes_down - short.bytes_up - short.bytes_down
    assert 100 * sum(decoding.message_bytes(1)) == pytest.approx(more, rel=0.02)


def test_a_call_without_norms_takes_the_widths_of_the_rule() -> None:
    assert [Group("mlp", width, (8,)).bits(FORWARD) for width in (576, 1536, 4096, 28672)] == [24, 26, 28, 32]


def test_time_is_what_the_formula_says() -> None:
    """A link that is slow alone decides; on one host masks come on top of what is waited for."""
    slow = MODEL.training(SEVEN_B, Link("slow", 1e6, 0.0))
    assert slow.link == pytest.approx((slow.up + slow.down) * 8 / 1e6)
    assert slow.seconds == pytest.approx(slow.link + slow.provider + slow.trips + slow.code + slow.own)
    fast = MODEL.training(SEVENTY_B, cost.LINKS[3])
    assert fast.seconds == pytest.approx(fast.masks + fast.code + fast.own)
    here = MODEL.training(SEVENTY_B, cost.LINKS[-1])
    assert here.seconds == pytest.approx(here.masks + here.link + here.provider + here.trips + here.code + here.own)
    far = [MODEL.decoding(SMOLLM2, Link("far", 1e9, wait), 1).seconds for wait in (0.1, 0.2)]
    assert far[1] - far[0] == pytest.approx(120 * 0.1)


def test_what_is_kept_is_neither_sent_nor_masked() -> None:
    kept = MODEL.decoding(SMOLLM2, cost.LINKS[0], 1, keep="attention")
    whole = MODEL.decoding(SMOLLM2, cost.LINKS[0], 1)
    assert Calls.decoding(SMOLLM2, "attention").numbers == 172_800  # docs/keep.md
    assert kept.masks == pytest.approx(whole.masks * 172_800 / 253_440)
    assert kept.own > whole.own
