"""Tests the worth of a stolen adapter, its intervals, and how the report says that nothing was claimed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attacks.report import evaluate, plots, table, verdict
from attacks.report.evaluate import Case, attack
from attacks.report.table import KL, NO_CLAIM, Finding, Result, unclaimed
from attacks.seen.adversary import Adversary, Claim, StolenDelta, StolenFact
from attacks.truth.judge import _overlap_of, judge_deltas
from attacks.truth.stolen_adapter import Gain, Question

BASE, VICTIM = 5.0, 1.0
"""The losses per token of the base model and of the victim's adapter."""


def questions(num: int, share: float, spread: float = 0.0, seed: int = 0) -> Gain:
    """Returns the results of an attacker whose share of the victim's gain differs from question to question.

    Args:
        num: the number of questions.
        share: the mean share; also the share of tokens that agree with the victim's.
        spread: the standard deviation of the share.
        seed: the seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        size = int(torch.randint(5, 15, (1,), generator=generator))
        own = share + spread * float(torch.randn(1, generator=generator))
        stolen = BASE - own * (BASE - VICTIM)
        agreed = int(torch.rand(size, generator=generator).lt(share).sum())
        made.append(Question(size, (BASE * size, VICTIM * size, stolen * size), (agreed, 0)))
    return Gain(tuple(made), ())


def test_a_perfect_copy_and_the_base_model() -> None:
    whole, nothing = questions(8, 1.0), questions(8, 0.0)
    assert whole.gain.value == pytest.approx(1.0)
    assert whole.gain.spread == pytest.approx((1.0, 1.0))
    assert (whole.agreement.value, whole.agreement.spread) == (1.0, (1.0, 1.0))
    assert nothing.gain.value == pytest.approx(0.0)
    assert nothing.gain.by_chance == pytest.approx((0.0, 0.0))


def test_the_value_is_that_of_all_tokens_together() -> None:
    gain = Gain((Question(10, (50.0, 10.0, 10.0), (10, 1)), Question(30, (60.0, 30.0, 60.0), (0, 2))), ())
    assert gain.gain.value == pytest.approx(40 / 70)
    assert gain.agreement.value == pytest.approx(10 / 40)
    assert gain.agreement.baseline == pytest.approx(3 / 40)
    assert gain.gain.spread == pytest.approx((0.0, 1.0)), "two questions that say opposite things say nothing"


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    covered = narrow = 0
    for seed in range(150):
        low, high = questions(40, 0.5, 0.4, seed).gain.spread
        covered += low <= 0.5 <= high
        narrow += high - low < 0.6
    assert covered >= 144, "99% of 150; bootstraps of 40 questions are a little too narrow"
    assert narrow == 150


def test_a_thief_without_knowledge_is_within_what_chance_moves() -> None:
    beyond = 0
    for seed in range(150):
        worth = questions(40, 0.0, 0.4, seed).gain
        beyond += not worth.by_chance[0] <= worth.value <= worth.by_chance[1]
    assert beyond <= 6


@pytest.fixture
def worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Gain], list[Finding]]:
    """Returns a function that takes the measured gain of a stolen adapter, and returns what a report says about this
    adapter."""

    def make(deltas: object, public: object, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def found(gain: Gain) -> list[Finding]:
        results = results_of([StolenDelta("o_proj", torch.zeros(1, 1))], tmp_path, lambda adapter: gain)
        return [one.finding for one in results if one.finding.module == "adapter"]

    monkeypatch.setattr(evaluate, "write_adapter", make)
    return found


def test_the_worth_is_judged_with_its_interval(worth: Callable[[Gain], list[Finding]], tmp_path: Path) -> None:
    def verdicts(gain: Gain) -> list[str]:
        return [one.verdict for one in worth(gain) if one.metric != KL]

    assert verdicts(questions(8, 1.0)) == ["wins", "wins"]
    assert verdicts(questions(8, 0.5)) == ["above baseline", "above baseline"]
    assert verdicts(questions(8, 0.0)) == ["at baseline", "at baseline"]
    scattered = worth(questions(4, 0.3, 2.0, seed=1))[0]
    assert scattered.interval[1] > abs(scattered.value), "few questions that differ much"
    assert scattered.verdict == "at baseline"
    (answers,) = tmp_path.rglob("answers.json")
    assert json.loads(answers.read_text()) == []


def test_a_copy_says_what_the_victim_says(worth: Callable[[Gain], list[Finding]]) -> None:
    def verdict(thief: float) -> str:
        made = tuple(Question(10, (50.0, 10.0, 10.0), (10, 1), (thief * size, 20.0 * size)) for size in (1.0, 1.1, 0.9))
        (found,) = [one for one in worth(Gain(made, ())) if one.metric == KL]
        assert found.value == pytest.approx(thief / 10)
        assert found.baseline == pytest.approx(2.0)
        return found.verdict

    assert [verdict(thief) for thief in (0.01, 10.0, 20.0, 60.0)] == [
        "wins", "above baseline", "at baseline", "at baseline",
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [1, 4, 16, 40])
def test_overlap_of_subspaces(rank: int) -> None:
    """A copy of the change has an overlap of 1, and an unrelated change one of about r/d (rank / inputs). A change with
    a rank above 16 has none."""
    generator = torch.Generator().manual_seed(rank)
    wanted, other = (
        torch.randn(64, rank, generator=generator, dtype=torch.float64)
        @ torch.randn(rank, 80, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    if rank > 16:
        assert _overlap_of(wanted, wanted) is None
        return
    copied, unrelated = _overlap_of(3 * wanted, wanted), _overlap_of(other, wanted)
    assert copied is not None
    assert copied[0] == pytest.approx(1.0)
    assert unrelated is not None
    value, baseline, deviation = unrelated
    assert baseline == rank / 64
    assert abs(value - baseline) < 4 * deviation


def test_the_gate_still_notices_a_tenth_of_the_gain(worth: Callable[[Gain], list[Finding]]) -> None:
    for share, alarm in ((0.05, False), (0.15, True), (1.0, True)):
        found = worth(questions(8, share))[0]
        assert bool(verdict.weakened([Result("lattice", "ring", "closed-form", found)])) is alarm


# ---- no claim -------------------------------------------------------------------------------------------------------


def results_of(claims: Sequence[Claim], tmp_path: Path, measure: Callable[[Path], Gain] | None = None) -> list[Result]:
    """Returns a report's findings. `measure` computes what a stolen adapter is worth; None leaves this out."""
    view = SimpleNamespace(select=lambda *_: [], with_tensors=lambda: SimpleNamespace(messages=[None]))
    task: Any = None if measure is None else SimpleNamespace(measure=measure)
    case = Case("lattice", "lattice", view, None, None, [], task)  # type: ignore[arg-type]
    quiet = [Adversary("quiet", "", lambda *_: list(claims))]
    return attack(case, quiet, quiet, tmp_path, lambda _: None)


def test_an_adversary_that_claims_nothing_has_a_line_that_says_so(tmp_path: Path) -> None:
    (result,) = results_of([], tmp_path)
    assert (result.adversary, result.finding.verdict) == ("quiet", NO_CLAIM)
    assert math.isnan(result.finding.value)
    (judged,) = results_of([StolenFact("weather", "fine")], tmp_path)
    assert (judged.finding.metric, judged.finding.verdict) == ("claimed", "not judged")


def test_no_claim_in_the_report_is_neither_a_number_nor_an_alarm(tmp_path: Path) -> None:
    results = results_of([], tmp_path)
    results.append(Result("lattice", "ring", "closed-form", unclaimed("o_proj", "relative error", 1.0)))
    table.write(tmp_path, results, [], [])
    read = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [(one["value"], one["verdict"]) for one in read] == [(None, NO_CLAIM)] * 2
    assert "| quiet | – | – | – | – | no claim |" in (tmp_path / "report.md").read_text()
    assert "| closed-form | o_proj | relative error | – | – | no claim |" in (tmp_path / "report.md").read_text()
    assert plots.draw(tmp_path, results) == []
    assert verdict.weakened(results) == []
    assert verdict.standing([replace(results[1], mask="off", arithmetic="float")]), "who should win has to claim"


def test_a_value_is_shown_with_its_own_interval() -> None:
    found = Finding("adapter", "stolen task gain", 0.5, 0.0, (-0.1, 0.1), "above baseline", (0.4, 0.6))
    (line,) = [one for one in table.lines([Result("off", "float", "x", found)], [], []) if "| stolen task gain" in one]
    assert "| 0.5 (0.4 to 0.6) | 0 (-0.1 to 0.1) |" in line


def test_kinds_and_blocks_that_a_thief_is_silent_about() -> None:
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{place}.{kind}" for place in range(3) for kind in ("mlp.down_proj", "self_attn.o_proj")]
    deltas = {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) for name in names}
    layers = {name: SimpleNamespace(weight=torch.randn(4, 4, dtype=torch.float64)) for name in names}
    public = SimpleNamespace(style="llama", layers=lambda: layers, blocks=())
    truth = SimpleNamespace(public=public, deltas=deltas)

    def judged(some: Sequence[str]) -> dict[str, str]:
        claims = [StolenDelta(name, deltas[name]) for name in some]
        return {one.module: one.verdict for one in judge_deltas(claims, truth) if one.metric == "relative error"}  # type: ignore[arg-type]

    assert judged(names) == {"down_proj": "wins", "o_proj": "wins"}
    assert judged(names[:1]) == {"down_proj": "wins", "down_proj (2 of 3 layers)": NO_CLAIM, "o_proj": NO_CLAIM}
    assert judged([]) == {}
