"""Runs `traffic-shape` on messages of zeros with known row counts, and on traffic of adapters that a tenant trains."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from attacks.adversaries import traffic_shape as shape
from attacks.adversaries.traffic_shape import BOFT, IA3, KIND, LORA, LOWEST, NORMS, OFT, PREFIX, TRAFFIC_SHAPE
from attacks.controls import ControlResult
from attacks.controls.lattice import manifest, no_model
from attacks.seen.adversary import StolenFact
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Exchange, View, open_view, write_recording
from attacks.victim import models
from attacks.victim.models import load_public
from wire.frame import Call
from wire.manifest import Manifest
from wire.ring.seeded_rows import Rows
from wire.transport.inproc import InprocConnection

if TYPE_CHECKING:  # loading a provider and a tenant takes seconds, which only the control itself needs
    from provider.model.served_model import ServedModel

# ---- real traffic of adapters of each kind --------------------------------------------------------------------------
#
# Trains tiny adapters of many kinds with the real tenant code, and records the metadata that the provider sees.
#
# Tenant and provider run in this process, so that one kind takes only half a second. The provider's own recorder writes
# the recording. No mask is used, because the metadata are the same under every mask.

PROMPTS = ("who founded us?", "what year?")
"""The prompts that the tenant sends with each adapter. Each character is one token, and each answer has one token."""
NUM_VIRTUAL = 4
_BATCH = 4


@dataclass(frozen=True)
class _Example:
    """Holds one adapter and the facts about the adapter that an adversary should claim.

    Attributes:
        kind: one of traffic_shape.KINDS.
        config: a function that makes the adapter's PEFT config.
        lowest: the name of the first layer in the lowest group (layers that read the same input) with an adapted layer.
            If the adapter changes no layer, but changes the inputs of later layers, this is `before ` and the first
            layer whose input changes.
        members: the last parts of the names of those layers of the lowest group whose inputs the adapter changes,
            joined by `+`; empty if there are none.
    """

    kind: str
    config: Callable[[], Any]
    lowest: str
    members: str = ""

    @property
    def num_virtual(self) -> int:
        """Returns the number of rows that a soft prompt adds before each prompt; 0 if the adapter adds none."""
        return NUM_VIRTUAL if self.kind in (shape.PROMPT, shape.P_TUNING) else 0


def _peft(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import peft

        return getattr(peft, name)(task_type="CAUSAL_LM", **options)

    return make


def _targets(name: str, *targets: str, **options: Any) -> Callable[[], Any]:
    return _peft(name, target_modules=list(targets), **options)


def _oft(*targets: str) -> Callable[[], Any]:
    return _targets("OFTConfig", *targets, oft_block_size=8)


def _boft(*targets: str) -> Callable[[], Any]:
    return _targets("BOFTConfig", *targets, boft_block_size=8)


def _ia3_before(*targets: str) -> Callable[[], Any]:
    return _targets("IA3Config", *targets, feedforward_modules=list(targets))


_Q, _O = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
_UP, _DOWN = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"
LLAMA: Mapping[str, _Example] = {
    "LoRA of q": _Example(shape.LORA, _targets("LoraConfig", "q_proj", r=2), _Q),
    "LoRA of all": _Example(shape.LORA, _peft("LoraConfig", target_modules="all-linear", r=2), _Q),
    "VeRA of q": _Example(shape.LORA, _targets("VeraConfig", "q_proj", r=4), _Q),
    "IA3 by default": _Example(shape.IA3, _peft("IA3Config"), _Q),
    "OFT of o": _Example(shape.OFT, _oft("o_proj"), _O),
    "BOFT of o": _Example(shape.BOFT, _boft("o_proj"), _O),
    "LoRA of o": _Example(shape.LORA, _targets("LoraConfig", "o_proj", r=2), _O),
    "IA3 of o": _Example(shape.IA3, _targets("IA3Config", "o_proj", feedforward_modules=[]), _O),
    "tuning of norms before MLPs": _Example(
        shape.NORMS, _targets("LNTuningConfig", "post_attention_layernorm"), f"before {_UP}"
    ),
    "LoRA of gate": _Example(shape.LORA, _targets("LoraConfig", "gate_proj", r=2), _UP),
    "IA3 before down": _Example(shape.IA3, _ia3_before("down_proj"), _DOWN),
    "OFT of down": _Example(shape.OFT, _oft("down_proj"), _DOWN),
    "BOFT of down": _Example(shape.BOFT, _boft("down_proj"), _DOWN),
    "IA3 before up": _Example(shape.IA3, _ia3_before("up_proj"), _UP, "up_proj"),
    "OFT of up": _Example(shape.OFT, _oft("up_proj"), _UP, "up_proj"),
    "BOFT of up": _Example(shape.BOFT, _boft("up_proj"), _UP, "up_proj"),
    "IA3 before q and v": _Example(shape.IA3, _ia3_before("q_proj", "v_proj"), _Q, "q_proj+v_proj"),
    "OFT of q and v": _Example(shape.OFT, _oft("q_proj", "v_proj"), _Q, "q_proj+v_proj"),
    "BOFT of q and v": _Example(shape.BOFT, _boft("q_proj", "v_proj"), _Q, "q_proj+v_proj"),
    "IA3 before k": _Example(shape.IA3, _ia3_before("k_proj"), _Q, "k_proj"),
    "OFT of k": _Example(shape.OFT, _oft("k_proj"), _Q, "k_proj"),
    "BOFT of k": _Example(shape.BOFT, _boft("k_proj"), _Q, "k_proj"),
    "prompt tuning": _Example(
        shape.PROMPT, _peft("PromptTuningConfig", num_virtual_tokens=NUM_VIRTUAL), f"before {_Q}"
    ),
    "P-tuning": _Example(
        shape.P_TUNING, _peft("PromptEncoderConfig", num_virtual_tokens=NUM_VIRTUAL, encoder_hidden_size=8),
        f"before {_Q}",
    ),
    "prefix tuning": _Example(
        shape.PREFIX, _peft("PrefixTuningConfig", num_virtual_tokens=NUM_VIRTUAL), f"before {_O}"
    ),
    "tuning of all norms": _Example(
        shape.NORMS, _targets("LNTuningConfig", "input_layernorm", "post_attention_layernorm"), f"before {_Q}"
    ),
    "trained embeddings": _Example(
        shape.EMBEDDINGS, _peft("TrainableTokensConfig", token_indices=[5, 6]), f"before {_Q}"
    ),
}  # fmt: skip
"""The adapters of tiny-llama and the facts that an adversary should claim about each, by a name for tests."""
_BLOCK = "transformer.h.0."
GPT2: Mapping[str, _Example] = {
    "LoRA of c_attn": _Example(
        shape.LORA, _targets("LoraConfig", "c_attn", r=2, fan_in_fan_out=True), f"{_BLOCK}attn.c_attn"
    ),
    "IA3 by default": _Example(shape.IA3, _peft("IA3Config", fan_in_fan_out=True), f"{_BLOCK}attn.c_attn"),
    "prompt tuning": _Example(
        shape.PROMPT, _peft("PromptTuningConfig", num_virtual_tokens=NUM_VIRTUAL), f"before {_BLOCK}attn.c_attn"
    ),
    "prefix tuning": _Example(
        shape.PREFIX, _peft("PrefixTuningConfig", num_virtual_tokens=NUM_VIRTUAL), f"before {_BLOCK}attn.c_proj"
    ),
}  # fmt: skip
"""The adapters of tiny-gpt2 and their facts. In this model q, k and v are one layer, so no group has several layers."""


@dataclass(frozen=True)
class _Recorded:
    """Serves a model as the honest provider does, and records every request and reply."""

    served_model: ServedModel

    def manifest(self) -> Manifest:
        return self.served_model.manifest()

    def read_file(self, file_name: str) -> Iterator[bytes]:
        return self.served_model.read_file(file_name)

    def read_weights(self, group: int) -> Iterator[bytes]:
        return self.served_model.read_weights(group)

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        reply = self.served_model.compute(call, rows)
        self.served_model.record("victim", call, rows, reply)
        return reply


class Site:
    """Makes a tiny model, and records what the model's provider sees while a tenant trains and uses an adapter."""

    def __init__(self, folder: Path, name: str = "tiny-llama") -> None:
        """Makes a tiny base model and prepares it for serving.

        Args:
            folder: the folder for the model, recordings and adapters.
            name: the model's name, one of TINY_MODELS (attacks/victim/names.py).
        """
        from provider.model.load import load, resolve
        from provider.model.weights import serve_model

        self._folder = folder
        self._model = models.make(name, folder / "model")
        self._served = serve_model(load(resolve(str(self._model))), recording=True)
        self.public: PublicModel = load_public(str(self._model), self._served.manifest)[1]
        self._num_views = 0

    def view(self, example: _Example, steps: int = 1, **options: Any) -> View:
        """Returns what a provider sees of a tenant that trains the adapter and then sends PROMPTS.

        Args:
            example: the adapter to train.
            steps: the number of training steps.
            options: keyword arguments for `client.finetune`.
        """
        from provider.model.served_model import ServedModel
        from provider.operations.recording import Recorder
        from tenant_sdk import TenantClient, embedded

        self._num_views += 1
        seen, adapter = (self._folder / f"{what}-{self._num_views}" for what in ("seen", "adapter"))
        served_model = ServedModel(self._served, Recorder(seen, self._served.manifest))
        with (
            mock.patch.object(embedded, "connect_inproc", return_value=InprocConnection(_Recorded(served_model))),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            with TenantClient(
                f"inproc:{self._model}", mask="off", cache=self._folder / "cache", progress=False
            ) as client:
                client.finetune(
                    list(models.FACTS), example.config(), adapter, max_steps=steps, batch_size=_BATCH,
                    progress=False, resume=False, overwrite=True, **options,
                )  # fmt: skip
                for prompt in PROMPTS:
                    client.generate(prompt, adapter=adapter, max_new_tokens=1)
        served_model.close()
        return open_view(seen)


CHOSEN = (
    "LoRA of q", "IA3 before up", "OFT of k", "BOFT of q and v", "prompt tuning", "prefix tuning", "tuning of all norms"
)  # fmt: skip
"""The adapters of LLAMA that the positive control of `traffic-shape` trains. All of them would take too long."""


def right_facts(example: _Example, claimed: Mapping[str, object]) -> tuple[int, int]:
    """Returns how many facts about an adapter were claimed correctly, and how many facts there are.

    A claim that lists several possible values counts as correct if the true value is listed and the list is short: at
    most three layers or sets of layers, and at least one kind of adapter less than there are. If the claim assumes that
    `client.finetune` trained the adapter, the list may have at most two kinds.
    """
    found = [example.kind in _named(claimed, shape.KIND, len(shape.KINDS) - 1)]
    found.append(example.lowest in _named(claimed, shape.LOWEST, 3))
    found.append(claimed.get("prompt tokens") == lengths(example))
    if shape.KIND_IF_FINETUNE in claimed:
        found.append(example.kind in _named(claimed, shape.KIND_IF_FINETUNE, 2))
    sets = [{name.rpartition(".")[2] for name in one.split("+")} for one in _named(claimed, shape.MEMBERS, 3)]
    found.append(set(example.members.split("+")) in sets if example.members else not sets)
    return sum(found), len(found)


def _named(claimed: Mapping[str, object], name: str, most: int) -> tuple[str, ...]:
    value = claimed.get(name, ())
    return value if isinstance(value, tuple) and len(value) <= most else ()


def lengths(example: _Example) -> str:
    """Returns the number of rows of each prompt, soft-prompt rows included, as comma-separated text."""
    return ",".join(str(len(prompt) + example.num_virtual) for prompt in PROMPTS)


# ---- messages of zeros, and the control -----------------------------------------------------------------------------
#
# Runs `traffic-shape` on messages of zeros with known row counts, because the adversary reads only metadata.
#

NUM_GROUPS = 4
PROMPT_LENGTHS = ((7, 1), (12, 5), (3, 2))
"""The number of prompt tokens and the number of answer tokens of each prompt."""
STEPS = (96, 64)
"""The number of rows of each training step."""


def traffic_shape_control() -> ControlResult:
    """Computes the share of facts that the adversary claims correctly, over messages of zeros and over adapters that a
    real tenant trains at a real provider."""
    right = total = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, changes_inputs in enumerate((False, True)):
            got = claimed(record(Path(scratch) / str(number), changes_inputs), no_model())
            wanted = facts(changes_inputs)
            right += sum(got.get(name) == value for name, value in wanted.items())
            total += len(wanted)
        site = Site(Path(scratch))
        for name in CHOSEN:
            example = LLAMA[name]
            here = right_facts(example, claimed(site.view(example), site.public))
            right, total = right + here[0], total + here[1]
    setting = f"rows of zeros, and {len(CHOSEN)} real adapters"
    return ControlResult(TRAFFIC_SHAPE.name, setting, "share of right facts", right / total, 1.0, smaller_wins=False)


def claimed(view: View, model: PublicModel) -> Mapping[str, object]:
    """Returns the value of each claim of the adversary about a view, by the claim's name."""
    claims = TRAFFIC_SHAPE.attack(view, model, None)
    return {claim.name: claim.value for claim in claims if isinstance(claim, StolenFact)}


def facts(changes_inputs: bool) -> Mapping[str, object]:
    """Returns the true facts about the traffic of `record`, by name. There are few facts, because each group has one
    layer and the adversary gets a model without norms."""
    return {
        "prompt tokens": ",".join(str(given + answered - 1) for given, answered in PROMPT_LENGTHS),
        "answer tokens": ",".join(str(answered) for _, answered in PROMPT_LENGTHS),
        LOWEST: ("l0", "l1") if changes_inputs else ("l1", "l2", "before l2"),
        KIND: (IA3, OFT, BOFT) if changes_inputs else (LORA, IA3, OFT, BOFT, PREFIX, NORMS),
        "training rows per step": ",".join(map(str, STEPS)),
    }


def record(folder: Path, changes_inputs: bool, checkpointing: bool = False) -> View:
    """Records messages of training and then of inference with an adapter on layer group 1. There are gradients of the
    group's input only if the adapter changes that input.

    Args:
        folder: the folder to make.
        changes_inputs: whether group 1 is requested twice, as if two of its layers had different inputs.
        checkpointing: whether the upper two groups, then the lower two, are computed again before their gradients.
    """
    calls = [0, 1, 1, 2, 3] if changes_inputs else [0, 1, 2, 3]
    backward = [3, 2, 1, 1] if changes_inputs else [3, 2]
    exchanges: list[Exchange] = []
    for rows in STEPS:
        exchanges += _messages(calls, rows)
        if checkpointing:
            for part in ((2, 3), (0, 1)):
                exchanges += _messages([group for group in calls if group in part], rows)
                exchanges += _messages([group for group in backward if group in part], rows, "backward")
        else:
            exchanges += _messages(backward, rows, "backward")
    for given, answered in PROMPT_LENGTHS:
        for rows in (given, *[1] * (answered - 1)):
            exchanges += _messages(calls, rows)
    return write_recording(folder, manifest(*[2] * NUM_GROUPS), exchanges)


def _messages(groups: Sequence[int], num_rows: int, direction: str = "forward") -> list[Exchange]:
    nothing = torch.zeros(num_rows, 2, dtype=torch.int32)
    return [Exchange(group, nothing, nothing.clone(), direction) for group in groups]
