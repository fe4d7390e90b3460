"""Tests a provider that sends wrong replies. With `verify`, each wrong reply ends the session in the same way.
Without it, the lengths of answers tell this provider about the prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from attacks.programs import active, row_counts
from attacks.programs.active import NEW_TOKENS, Outcome
from wire.frame import Arithmetic, Call, Direction

NUM_PROMPTS = 4
GUESSING = 1 / 3
HINT_FAULT = active.SECRET_FAULT.name


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return active.measure(tmp_path_factory.mktemp("active"), NUM_PROMPTS)


def one(outcomes: list[Outcome], job: str, fault: str | None, verify: bool = False) -> Outcome:
    (found,) = [each for each in outcomes if (each.job, each.fault, each.verify) == (job, fault, verify)]
    return found


@pytest.mark.slow
def test_honest_runs_differ_in_nothing_that_can_be_seen(outcomes: list[Outcome]) -> None:
    honest = [each for each in outcomes if each.fault is None]
    assert len(honest) == 5
    for each in honest:
        assert not each.failed
        assert not each.tells_secrets_apart
        assert all(steps == NEW_TOKENS for steps in each.decode_steps)


@pytest.mark.slow
def test_with_verify_every_fault_ends_the_session_alike(outcomes: list[Outcome]) -> None:
    checked = [each for each in outcomes if each.verify and each.fault is not None]
    assert len(checked) == len(active.FORWARD_FAULTS) + len(active.TRAINING_FAULTS)
    for each in checked:
        assert each.caught, each
        assert each.requests_after == 0, "nothing is sent after it, and nothing starts again"
        assert each.metadata == "cut short", "an honest run up to the fault"
        assert not each.tells_secrets_apart, "an abort says that a fault was sent and no more"


@pytest.mark.slow
def test_without_verify_no_fault_is_an_error(outcomes: list[Outcome]) -> None:
    """Without `verify`, no run fails after a wrong reply. A wrong number decodes to one no larger than the largest that
    a right reply can hold, so nothing becomes NaN or infinite."""
    assert not any(each.failed for each in outcomes if not each.verify)


@pytest.mark.slow
def test_without_verify_fixed_length_training_shows_nothing(outcomes: list[Outcome]) -> None:
    training = [each for each in outcomes if each.job == "training" and not each.verify]
    assert len(training) == 1 + len(active.TRAINING_FAULTS)
    for each in training:
        assert each.metadata == "same", each
        assert not each.tells_secrets_apart
        assert each.requests_after or each.fault is None, "the fault was sent"


@pytest.mark.slow
def test_without_verify_answer_lengths_tell_prompts_apart(outcomes: list[Outcome]) -> None:
    """A large fault changes the lengths of answers, and the lengths tell two prompts apart. docs/threat-model.md states
    this as a limit."""
    for fault in ("product + 2^30", "product + 2^31"):
        found = one(outcomes, "answers", fault)
        assert found.answer_length_changed
        assert found.tells_secrets_apart
        again = one(outcomes, "repeated", fault)
        assert len(set(again.decode_steps)) == 1, "one prompt always gives one length: it is read from the data"
    assert one(outcomes, "answers", "product + 1").metadata == "same"


def test_without_verify_a_wrong_hint_reads_the_masks_secret(tmp_path: Path) -> None:
    reading = active.read_secret(tmp_path / "site")
    assert reading.num_claims >= 5
    assert reading.num_right / reading.num_claims >= 0.9 > GUESSING


def test_a_reply_is_wrong_in_one_number(tmp_path: Path) -> None:
    """A fault changes a single number of a reply. Adding 2^31 flips the highest bit of this number and nothing else."""
    where = active.site(tmp_path)
    replies = []
    for fault in (None, active.FORWARD_FAULTS[3]):
        liar = active.Liar(where.served_model, fault, where.group, where.column)
        call = Call(where.group, Direction.FORWARD, Arithmetic.RING)
        rows = torch.arange(96, dtype=torch.int32).view(3, 32) * 12345
        replies.append(liar.compute(call, rows))
    wrong = (replies[0] != replies[1]).nonzero().tolist()
    assert wrong == [[2, where.column]]
    assert int(replies[0][2, where.column]) ^ int(replies[1][2, where.column]) == -(2**31)


@pytest.mark.slow
def test_the_command_writes_both_files(
    tmp_path: Path, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active, "measure", lambda folder: outcomes)
    monkeypatch.setattr(active, "read_secret", lambda folder: active.SecretReading(24, 15, 15))
    leaks = [
        row_counts.Leak(bundle, defence, job, 4.0 if defence == row_counts.STOCK else 0.0, refused=False)
        for bundle, jobs in row_counts.BUNDLES.items()
        for job in jobs
        for defence in (row_counts.STOCK, *row_counts.DEFENCES)
    ]
    monkeypatch.setattr(row_counts, "measure", lambda folder: leaks)  # test_row_counts.py runs the real one
    assert active.main(["--out", str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out" / "active.json").read_text())
    assert len(data["outcomes"]) == len(outcomes)
    assert data["secret_reading"]["num_right"] == 15
    assert data["row_counts"] == [asdict(leak) for leak in leaks]
    text = (tmp_path / "out" / "active.md").read_text()
    assert f"| off | repeated | {HINT_FAULT} | no |" in text
    assert f"| {row_counts.WITHIN_BOUNDS} | prompts | 4.0 | 0.0 | 0.0 | 0.0 |" in text
    leaks[-1] = replace(leaks[-1], bits=0.5)
    assert active.main(["--out", str(tmp_path / "out")]) == 1, "the last bundle reads something through pad_rows="
