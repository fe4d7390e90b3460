"""Tests that metadata alone gives lengths, training rows, and the kind and lowest layer of an adapter, without reading
a tensor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from attacks.adversaries.traffic_shape import (
    KIND,
    KIND_IF_FINETUNE,
    KINDS,
    LOWEST,
    TRAFFIC_SHAPE,
    Training,
    changed_members,
    num_calls,
)
from attacks.controls import traffic_shape
from attacks.controls import traffic_shape as control
from attacks.controls.lattice import manifest, no_model
from attacks.seen.adversary import StolenFact
from attacks.seen.forward_passes import prompts
from attacks.seen.view import Exchange, Message, View, open_view, write_recording
from attacks.victim import harness, models
from attacks.victim.tenant import Job, Run


def facts(view: View) -> dict[str, object]:
    claims = TRAFFIC_SHAPE.attack(view, no_model(), None)
    assert all(isinstance(claim, StolenFact) for claim in claims)
    return {claim.name: claim.value for claim in claims if isinstance(claim, StolenFact)}


def rows(num_rows: int, group: int, direction: str = "forward", dtype: torch.dtype = torch.int32) -> Exchange:
    return Exchange(group, torch.zeros(num_rows, 2, dtype=dtype), torch.zeros(num_rows, 2, dtype=dtype), direction)


def test_wins_on_its_control() -> None:
    result = control.traffic_shape_control()
    assert result.wins, result
    assert result.adversary == TRAFFIC_SHAPE.name == "traffic-shape"


@pytest.mark.parametrize("changes_inputs", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_reads_no_tensor(
    changes_inputs: bool, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: Message) -> NoReturn:
        raise AssertionError(f"message {message.seq} was read")

    view = control.record(tmp_path / "seen", changes_inputs, checkpointing)
    for name in ("request", "reply"):
        monkeypatch.setattr(Message, name, refuse)
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
    assert got == {"prompt tokens": "6", "answer tokens": "2"}, "without gradients nothing tells kinds apart"


def test_gradients_at_the_first_group_name_the_first_group(tmp_path: Path) -> None:
    """If even the first group has gradients, the claim is that something before it is trained: the embeddings, a soft
    prompt or the group's own inputs."""
    sent = [rows(5, 0), rows(5, 1), rows(5, 1, "backward"), rows(5, 0, "backward")]
    got = facts(write_recording(tmp_path / "seen", manifest(2, 2), sent))
    assert got[LOWEST] == ("l0", "before l0")
    assert got["training rows per step"] == "5"
    assert "prompt tokens" not in got


def test_claims_nothing_without_messages(tmp_path: Path) -> None:
    view = control.record(tmp_path / "seen", False)
    assert facts(View(view.manifest, ())) == {}
    assert TRAFFIC_SHAPE.attack(view, no_model(), {0: torch.zeros(1, 2)}) == []


@pytest.mark.slow
def test_a_real_tenant_under_the_lattice_mask_is_read(tmp_path: Path) -> None:
    """A LoRA of the second block's q_proj sends no gradient of its own group, but it is still recognised."""
    model = models.make("tiny-llama", tmp_path / "model")
    job = Job(
        model=str(model), adapter=None, rows=list(models.FACTS), train_steps=1, traffic_steps=2,
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
    layer = "model.layers.1.self_attn"
    assert got.pop("answer tokens") == "1,1,4"
    # Without a model, it is not known which inputs come from norms and where a prefix would show first.
    assert got.pop(LOWEST) == (f"{layer}.q_proj", f"{layer}.o_proj", f"before {layer}.o_proj")
    assert got.pop(KIND) == ("LoRA", "IA3", "OFT", "BOFT", "prefix tuning", "norm tuning")
    assert got == {}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tuple[object, ...], dict[str, object]]]:
    """Returns metadata and claims for each adapter of tiny-llama that the real tenant trained and used at a real
    provider."""
    site = traffic_shape.Site(tmp_path_factory.mktemp("kinds"))
    found = {}
    for name, example in traffic_shape.LLAMA.items():
        view = site.view(example)
        shape = tuple((one.purpose, one.direction, one.group, one.num_rows) for one in view.messages)
        found[name] = shape, dict(control.claimed(view, site.public))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", traffic_shape.LLAMA)
def test_facts_of_real_adapters(name: str, seen: dict[str, tuple[tuple[object, ...], dict[str, object]]]) -> None:
    right, total = traffic_shape.right_facts(traffic_shape.LLAMA[name], seen[name][1])
    assert right == total >= 4, seen[name][1]


@pytest.mark.parametrize("name", traffic_shape.LLAMA)
def test_a_claim_names_the_kinds_whose_traffic_is_the_same(
    name: str, seen: dict[str, tuple[tuple[object, ...], dict[str, object]]]
) -> None:
    """Adapters whose messages are all alike must be named together, and no others."""
    shape, claims = seen[name]
    alike = {traffic_shape.LLAMA[other].kind for other in seen if seen[other][0] == shape}
    named = claims.get(KIND_IF_FINETUNE, claims[KIND])
    assert named == tuple(kind for kind in KINDS if kind in alike)
    assert set(named) <= set(claims[KIND])


@pytest.mark.slow
@pytest.mark.parametrize("name", traffic_shape.GPT2)
def test_a_model_whose_groups_have_one_layer(name: str, tmp_path: Path) -> None:
    site = traffic_shape.Site(tmp_path, "tiny-gpt2")
    example = traffic_shape.GPT2[name]
    claims = control.claimed(site.view(example), site.public)
    right, total = traffic_shape.right_facts(example, claims)
    assert right == total >= 4, claims
    assert not {"OFT", "BOFT"} & set(claims[KIND]), "PEFT has none for a Conv1D"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA of o", "OFT of k", "BOFT of q and v"])
def test_gradient_checkpointing_hides_nothing(
    name: str, tmp_path: Path, seen: dict[str, tuple[tuple[object, ...], dict[str, object]]]
) -> None:
    site = traffic_shape.Site(tmp_path)
    view = site.view(traffic_shape.LLAMA[name], gradient_checkpointing=True)
    assert len(view.messages) > len(seen[name][0])
    assert dict(control.claimed(view, site.public)) == seen[name][1]


def test_requests_that_were_split_are_no_repetitions(tmp_path: Path) -> None:
    def whole(direction: str, *groups: int) -> list[Exchange]:
        return [rows(part, group, direction) for group in groups for part in (4, 4, 2)]

    sent = [*whole("forward", 0, 1, 2), *whole("backward", 2, 1)]
    got = facts(write_recording(tmp_path / "split", manifest(2, 2, 2), sent))
    sent = [*(rows(10, group) for group in (0, 1, 2)), rows(10, 2, "backward"), rows(10, 1, "backward")]
    assert got == facts(write_recording(tmp_path / "whole", manifest(2, 2, 2), sent))
    assert got["training rows per step"] == "10"


@pytest.mark.parametrize(
    ("changed", "calls"), [((0,), 2), ((1,), 3), ((2,), 2), ((0, 1), 3), ((0, 2), 3), ((1, 2), 3), ((0, 1, 2), 3)]
)
def test_calls_of_a_group_whose_layers_read_other_inputs(changed: tuple[int, ...], calls: int) -> None:
    assert num_calls(3, changed) == calls


def test_nothing_repeated_names_no_members() -> None:
    assert changed_members(Training((0, 1), 1, frozenset(), None), [], manifest(2, 2)) == ()
