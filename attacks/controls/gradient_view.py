"""Runs `gradient-view` on an unmasked training step of an adapted tiny model; other controls reuse this traffic."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries.gradient_view import ADVERSARY, LABELS, NO_LABEL, TOKENS
from attacks.controls.control import ControlResult
from attacks.seen.adversary import StolenFact
from attacks.seen.public_model import PublicModel, describe
from attacks.seen.view import View
from attacks.victim import quick_model
from attacks.victim.synthetic import Exchange, write_recording
from wire.manifest import Manifest

BATCH_SIZE, NUM_TOKENS, NUM_PROMPT_TOKENS = 12, 8, 3


@dataclass(frozen=True)
class Traffic:
    """Holds a view (what a provider sees) of one prompt and one training step, and the secrets that an adversary should
    find in the view.

    Attributes:
        token_ids, labels: the token and the label of each row of the batch, in order. The label is the token to be
            predicted, or NO_LABEL if the row has none.
        gradients: the gradients of the batch's loss with respect to the base weights, by group id; float32, shape
            (in_features, out_features).
        deltas: ΔW by layer name, float64, shape (in_features, out_features); a fused layer has one entry.
    """

    view: View
    public: PublicModel
    token_ids: list[int]
    labels: list[int]
    gradients: dict[int, torch.Tensor]
    deltas: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Kept:
    """Keeps the input of each layer and the gradient of the layer's output, as (num_rows, features), by the layer's
    name."""

    inputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]

    def hook(self, name: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
        """Returns a forward hook that keeps a layer's input. If the input needs a gradient, the hook also keeps the
        gradient of the output, which a tenant would send in a backward call."""

        def keep(module: Any, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            self.inputs[name] = given[0].detach().reshape(-1, given[0].shape[-1]).clone()
            if given[0].requires_grad:
                output.register_hook(keep_gradient)

        def keep_gradient(gradient: torch.Tensor) -> None:
            self.gradients[name] = gradient.detach().reshape(-1, gradient.shape[-1]).clone()

        return keep


def make(folder: Path, name: str = "tiny-llama") -> Traffic:
    """Makes the traffic of one prompt and of one training batch, forward and backward. The prompt is the beginning of
    the batch's first sequence. The first two rows and the last row of each sequence have no label.

    Args:
        folder: a folder for the model and the recording.
        name: the model's name, one of quick_model.NAMES.
    """
    from transformers import AutoModelForCausalLM

    from provider.model.load import load, resolve
    from provider.model.weights import serve_model

    path = quick_model.make(name, folder / "model")
    manifest = serve_model(load(resolve(str(path))), "native").manifest
    public = describe(AutoModelForCausalLM.from_pretrained(path), manifest)
    adapted, kept = _adapted(AutoModelForCausalLM.from_pretrained(path), manifest)
    generator = torch.Generator().manual_seed(11)
    low = len(quick_model.SPECIAL)
    ids = torch.randint(low, len(public.embedding), (BATCH_SIZE, NUM_TOKENS), generator=generator)
    with torch.no_grad():
        adapted(input_ids=ids[:1, :5])
    exchanges = _exchanges(manifest, kept)
    targets = ids.roll(-1, dims=1)
    targets[:, : NUM_PROMPT_TOKENS - 1] = targets[:, -1] = NO_LABEL
    loss = torch.nn.functional.cross_entropy(adapted(input_ids=ids).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    exchanges += _exchanges(manifest, kept)
    view = write_recording(folder / "seen", manifest, exchanges)
    gradients = _weight_gradients(adapted, manifest)
    return Traffic(view, public, ids.flatten().tolist(), targets.flatten().tolist(), gradients, _deltas(adapted))


def _adapted(model: Any, manifest: Manifest) -> tuple[Any, _Kept]:
    """Returns the model with a LoRA adapter whose matrix B is not zero, and the object in which its layers keep their
    inputs and gradients. A backward pass also computes the gradients of the base weights."""
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    kept = _Kept({}, {})
    names = {layer.name for group in manifest.groups for layer in group.layers}
    for name, module in adapted.base_model.model.named_modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B["default"].weight, std=0.02)
        if name in names:
            module.register_forward_hook(kept.hook(name))
            getattr(module, "base_layer", module).weight.requires_grad_(True)
    return adapted, kept


def _exchanges(manifest: Manifest, kept: _Kept) -> list[Exchange]:
    """Returns one forward exchange for each group, then one backward exchange for each group with a kept gradient.
    Replies are zeros, because the adversary does not read replies."""
    made = []
    for group in manifest.groups:
        rows = kept.inputs[group.layers[0].name]
        made.append(Exchange(group.id, rows, torch.zeros(len(rows), 1)))
    for group in reversed(manifest.groups):
        if group.layers[0].name in kept.gradients:
            rows = torch.cat([kept.gradients[layer.name] for layer in group.layers], dim=1)
            made.append(Exchange(group.id, rows, torch.zeros(len(rows), 1), "backward"))
    return made


def _weight_gradients(adapted: Any, manifest: Manifest) -> dict[int, torch.Tensor]:
    modules: dict[str, Any] = dict(adapted.base_model.model.named_modules())
    found = {}
    for group in manifest.groups:
        parts = []
        for layer in group.layers:
            module = modules[layer.name]
            gradient = getattr(module, "base_layer", module).weight.grad
            parts.append(gradient if layer.kind == "conv1d" else gradient.t())
        found[group.id] = torch.cat(parts, dim=1)
    return found


def _deltas(adapted: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in adapted.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").detach().to(torch.float64)
            found[name] = delta.t() if isinstance(module.base_layer, torch.nn.Linear) else delta
    return found


def share_right(traffic: Traffic, fact: str) -> float:
    """Returns the share of the batch's tokens, or labels, that the adversary names correctly; 0 without a claim."""
    wanted = {TOKENS: traffic.token_ids, LABELS: traffic.labels}[fact]
    for claim in ADVERSARY.attack(traffic.view, traffic.public, None):
        if isinstance(claim, StolenFact) and claim.name == fact:
            named = [int(part) for part in str(claim.value).split(",")]
            return sum(one == other for one, other in zip(named, wanted, strict=False)) / len(wanted)
    return 0.0


def control() -> ControlResult:
    """Runs the adversary on one training step without a mask. The result's value is the share of the batch's tokens, or
    of its labels, that the adversary names rightly, whichever is smaller."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = make(Path(folder))
        value = min(share_right(traffic, TOKENS), share_right(traffic, LABELS))
    return ControlResult(
        ADVERSARY.name, "no mask, one training step of 12 rows of 8 tokens", "share of tokens and labels right",
        value, 1.0, smaller_wins=False,
    )  # fmt: skip
