"""Metadata alone gives lengths, training rows and the lowest adapted layer; no tensor is read for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from attacks import harness, quick_model
from attacks.adversaries.traffic_shape import ADVERSARY
from attacks.adversary import StolenFact
from attacks.controls import traffic_shape as control
from attacks.controls.lattice_traffic import manifest, no_model
from attacks.passes import prompts
from attacks.synthetic import Exchange, write_recording
from attacks.victim import Job, Run
from attacks.view import Message, View, open_view


def facts(view: View) -> dict[str, object]:
    claims = ADVERSARY.attack(view, no_model(), None)
    assert all(isinstance(claim, StolenFact) for claim in claims)
    return {claim.name: claim.value for claim in claims if isinstance(claim, StolenFact)}


def rows(num_rows: int, group: int, direction: str = "forward", dtype: torch.dtype = torch.int32) -> Exchange:
    return Exchange(group, torch.zeros(num_rows, 2, dtype=dtype), torch.zeros(num_rows, 2, dtype=dtype), direction)


def test_wins_on_its_control() -> None:
    result = control.control()
    assert result.wins, result
    assert result.adversary == ADVERSARY.name == "traffic-shape"


@pytest.mark.parametrize("changes_inputs", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_reads_no_tensor(
    changes_inputs: bool, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: Message, name: str) -> NoReturn:
        raise AssertionError(f"{name} of message {message.seq} was read")

    view = control.record(tmp_path / "seen", changes_inputs, checkpointing)
    monkeypatch.setattr(Message, "_read", refuse)
    assert facts(view) == control.facts(changes_inputs)


def test_truncated_recordings_tell_as_much(tmp_path: Path) -> None:
    view = control.record(tmp_path / "seen", False)
    cut = View(view.manifest, tuple(dataclasses.replace(message, file=None) for message in view.messages))
    assert facts(cut) == facts(view)


def test_lengths_are_those_of_the_rows_themselves(tmp_path: Path) -> None:
    view = control.record(tmp_path / "seen", False)
    assert facts(view)["prompt tokens"] == ",".join(str(prompt.num_tokens) for prompt in prompts(view))


def test_float_traffic_and_hints_do_not_matter(tmp_path: Path) -> None:
    hint = Exchange(1, torch.zeros(48, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.int32), purpose="hint")
    sent = [hint, *(rows(5, group, dtype=torch.float32) for group in range(4)), hint, *(rows(1, g) for g in range(4))]
    got = facts(write_recording(tmp_path / "seen", manifest(2, 2, 2, 2), sent))
    assert got == {"prompt tokens": "6", "answer tokens": "2", "PEFT kind": "adds to outputs"}


def test_gradients_at_the_first_group_name_the_first_group(tmp_path: Path) -> None:
    """Nothing lies below it: embeddings, a soft prompt or its own inputs are trained."""
    sent = [rows(5, 0), rows(5, 1), rows(5, 1, "backward"), rows(5, 0, "backward")]
    got = facts(write_recording(tmp_path / "seen", manifest(2, 2), sent))
    assert got["lowest adapted layer"] == "l0"
    assert got["training rows per step"] == "5"
    assert "prompt tokens" not in got


def test_claims_nothing_without_messages(tmp_path: Path) -> None:
    view = control.record(tmp_path / "seen", False)
    assert facts(View(view.manifest, ())) == {}
    assert ADVERSARY.attack(view, no_model(), {0: torch.zeros(1, 2)}) == []


def test_a_real_tenant_under_the_lattice_mask_is_read(tmp_path: Path) -> None:
    """LoRA of the second block's q_proj: no gradient is sent to its own group, and it is named all the same."""
    model = quick_model.make("tiny-llama", tmp_path / "model")
    job = Job(
        url="", model=str(model), runs=[], adapter=None, rows=list(quick_model.FACTS), train_steps=1, traffic_steps=2,
        learning_rate=1e-3, batch_size=4, traffic_rows=4, questions=[], peft_kind="lora",
        peft={"r": 2, "target_modules": r".*layers\.1\.self_attn\.q_proj"},
        prompts=[[5, 6, 7], [8, 9], [10, 11, 12, 13]], num_answered=1, answer_tokens=4, truth=tmp_path / "truth",
    )  # fmt: skip
    run = Run(label="lattice", mask="lattice", identity=tmp_path)
    harness.record(tmp_path / "run", tmp_path / "seen", str(model), job, [run])
    view = open_view(tmp_path / "seen").of_tenant("lattice")
    got = facts(view)
    sent = json.loads((job.truth / "lattice.json").read_text())
    assert got.pop("prompt tokens") == ",".join(str(len(ids)) for ids in sent) == "3,2,7"
    assert len(str(got.pop("training rows per step")).split(",")) == 2
    assert got == {
        "answer tokens": "1,1,4",
        "lowest adapted layer": "model.layers.1.self_attn.q_proj",
        "PEFT kind": "adds to outputs",
    }
