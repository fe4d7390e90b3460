"""Makes unmasked traffic of a tiny model with a LoRA adapter, with the true ΔW, for controls that steal adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.controls.tiny import tiny_manifest, tiny_model, tiny_public
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from attacks.victim.synthetic import Exchange, write_recording
from wire.ring import coding

NUM_PROMPTS, NUM_TOKENS = 48, 5
_WEIGHT_NORM = 1000.0
"""The bound on the norm of a weight's column that `encode` gets. A column of 48 int8 weights, each at most 127, has a
Euclidean norm of at most 880."""
_LARGEST = 1 << 20
"""The upper limit of the numbers in `scaled`. For layers of real width, the rows that `wire.ring.coding.encode` returns
have about this Euclidean norm."""


@dataclass(frozen=True)
class Traffic:
    """Holds a view (what a provider sees) and the secrets that an adversary should find in the view.

    Attributes:
        token_ids: the token ids of each prompt.
        deltas: the adapter's change ΔW by layer name, float64, shape (in_features, out_features); a fused layer has one
            entry.
    """

    view: View
    public: PublicModel
    token_ids: list[list[int]]
    deltas: dict[str, torch.Tensor]


def make(
    folder: Path, kind: str = "llama", targets: str | list[str] = "all-linear", arithmetic: str = "float"
) -> Traffic:
    """Sends NUM_PROMPTS prompts with different first tokens through an adapted model, and records the unmasked inputs
    of its layers.

    Args:
        folder: a folder for the model and the recording.
        kind: the kind of model, as in `tiny_model`.
        targets: the layers that get LoRA, as PEFT's `target_modules`.
        arithmetic: `float` to send rows as they are; any other text sends them as encoded int32 rows.
    """
    from peft import LoraConfig, get_peft_model

    manifest = tiny_manifest(kind, "native", folder / "model")
    generator = torch.Generator().manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=kind != "llama")
    torch.manual_seed(7)  # PEFT draws lora_a from the global generator
    adapted: Any = get_peft_model(copy.deepcopy(tiny_model(kind)), config)
    deltas: dict[str, torch.Tensor] = {}
    for name, module in adapted.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            up = module.lora_B["default"].weight
            up.data.copy_(torch.randn(up.shape, generator=generator) * 0.02)
            delta = module.get_delta_weight("default").detach().to(torch.float64)
            deltas[name] = delta.t() if kind == "llama" else delta
    firsts = {group.layers[0].name: group.id for group in manifest.groups}
    seen: dict[int, torch.Tensor] = {}
    for name, module in adapted.base_model.model.named_modules():
        if name in firsts:
            module.register_forward_pre_hook(_keeper(seen, firsts[name]))
    token_ids = torch.randint(64, (NUM_PROMPTS, NUM_TOKENS), generator=generator)
    token_ids[:, 0] = torch.randperm(64, generator=generator)[:NUM_PROMPTS]
    exchanges = []
    for ids in token_ids:
        with torch.no_grad():
            adapted(input_ids=ids[None])
        for group, rows in sorted(seen.items()):
            sent = rows if arithmetic == "float" else coding.encode(rows, _WEIGHT_NORM)[0]
            exchanges.append(Exchange(group, sent, torch.zeros(rows.shape[0], 1, dtype=sent.dtype)))
    view = write_recording(folder / "seen", manifest, exchanges)
    return Traffic(view, tiny_public(kind, manifest), token_ids.tolist(), deltas)


def scaled(view: View) -> Opened:
    """Returns the view's rows, by message number (seq), as they look in ring arithmetic: each row is multiplied by its
    own positive factor and rounded to integers."""
    generator = torch.Generator().manual_seed(11)
    rows = {}
    for message in view.messages:
        sent = message.request().to(torch.float64)
        factors = 0.2 + 0.8 * torch.rand(sent.shape[0], 1, generator=generator, dtype=torch.float64)
        rows[message.seq] = (sent / sent.abs().amax(1, keepdim=True) * factors * _LARGEST).round()
    return rows


def _keeper(seen: dict[int, torch.Tensor], group: int) -> Any:
    def keep(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        seen[group] = given[0].detach().reshape(-1, given[0].shape[-1]).clone()

    return keep
