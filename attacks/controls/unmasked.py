"""Runs the adversaries that steal adapters, prompts and batches, on unmasked traffic of adapted tiny models.

`prompt_traffic` makes prompts through a LoRA adapter, and `step_traffic` one training step; both keep the true ΔW.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries import closed_form, prompt_inversion, substitute
from attacks.adversaries.gradients import GRADIENT_EQUATIONS, GRADIENT_VIEW, LABELS, NO_LABEL, TOKENS
from attacks.controls import ControlResult
from attacks.seen.adversary import StolenDelta, StolenFact, StolenTokens
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel, describe
from attacks.seen.view import Exchange, View, write_recording
from attacks.victim import models
from attacks.victim.models import tiny_manifest, tiny_model, tiny_public
from runtime.loading import quiet_transformers
from wire.manifest import Manifest
from wire.ring import coding

# ---- traffic of prompts ---------------------------------------------------------------------------------------------

NUM_PROMPTS, NUM_TOKENS = 48, 5
_WEIGHT_NORM = 1000.0
"""The bound on the norm of a weight's column that `encode` gets. A column of 48 int8 weights, each at most 127, has a
Euclidean norm of at most 880."""
_LARGEST = 1 << 20
"""The upper limit of the numbers in `scaled`. For layers of real width, the rows that `wire.ring.coding.encode` returns
have about this Euclidean norm."""


@dataclass(frozen=True)
class PromptTraffic:
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


def prompt_traffic(
    folder: Path, kind: str = "llama", targets: str | list[str] = "all-linear", arithmetic: str = "float"
) -> PromptTraffic:
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
    with quiet_transformers():
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
    return PromptTraffic(view, tiny_public(kind, manifest), token_ids.tolist(), deltas)


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


# ---- layer-0 lookup -------------------------------------------------------------------------------------------------
#
# Runs `layer-0 lookup` without a mask. The adversary must read every token of the prompts.


def layer0_lookup_control() -> ControlResult:
    """Computes the share of tokens that the adversary recovers correctly from unmasked traffic."""
    with tempfile.TemporaryDirectory() as scratch:
        traffic = prompt_traffic(Path(scratch))
        claims = prompt_inversion.LAYER0_LOOKUP.attack(traffic.view, traffic.public, None)
    got = {claim.prompt: claim.token_ids for claim in claims if isinstance(claim, StolenTokens)}
    right = sum(
        one == other
        for prompt, ids in enumerate(traffic.token_ids)
        for one, other in zip(got.get(prompt, ()), ids, strict=False)
    )
    total = sum(map(len, traffic.token_ids))
    return ControlResult("layer-0 lookup", "no mask", "recovery rate", right / total, 1.0, smaller_wins=False)


# ---- deep-state inversion -------------------------------------------------------------------------------------------
#
# Runs `deep-state inversion` without a mask. The adversary reads prompts from the second block's input alone.


def deep_state_control() -> ControlResult:
    """Computes the share of correct tokens among the tokens that the adversary claims. The adversary does not know the
    adapter. Prompts that it does not try, because of its limit, are not counted."""
    with tempfile.TemporaryDirectory() as scratch:
        traffic = prompt_traffic(Path(scratch))
        claims = prompt_inversion.DEEP_STATE.attack(traffic.view, traffic.public, None)
    pairs = [
        (one, other)
        for claim in claims
        if isinstance(claim, StolenTokens)
        for one, other in zip(claim.token_ids, traffic.token_ids[claim.prompt], strict=True)
    ]
    right = sum(one == other for one, other in pairs) / max(1, len(pairs))
    return ControlResult("deep-state inversion", "no mask", "recovery rate", right, 0.95, smaller_wins=False)


# ---- closed-form ----------------------------------------------------------------------------------------------------
#
# Runs `closed-form` without a mask. The adversary recovers the adapter's change of most layers to three digits.

TARGETS = ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def closed_form_control() -> ControlResult:
    """Computes the largest relative error of ΔW, in float and in ring arithmetic, over the layers that unmasked traffic
    determines. The error of a layer without a claim is 1.

    The traffic does not determine the last down_proj, whose output goes to a head that the tenant keeps. In ring
    arithmetic it does not determine gate_proj and up_proj of the last block either, because no message shows how large
    the inputs of the last down_proj are.
    """
    worst = max(_closed_form_error("float"), _closed_form_error("ring"))
    return ControlResult(
        "closed-form", "no mask, float and ring", "largest relative error", worst, 1e-3, smaller_wins=True
    )


def _closed_form_error(arithmetic: str) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        traffic = prompt_traffic(Path(scratch), targets=TARGETS, arithmetic=arithmetic)
        claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, None)
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    hidden = "model.layers.1.mlp.down_proj" if arithmetic == "float" else "model.layers.1.mlp."
    wanted = {layer: delta for layer, delta in traffic.deltas.items() if not layer.startswith(hidden)}
    return max(
        float((got[layer] - delta).norm() / delta.norm()) if layer in got else 1.0 for layer, delta in wanted.items()
    )


# ---- substitute -----------------------------------------------------------------------------------------------------
#
# Runs `substitute` on unmasked rows of unknown scale, as in ring arithmetic. The adversary recovers ΔW to two digits.

_TRAINED_TOGETHER = ("q_proj", "k_proj")
"""The traffic determines only the product of these two layers, so they are not judged one by one."""


def substitute_control() -> ControlResult:
    """Computes the largest relative error of ΔW over v, o, gate, up and down of both blocks, except the last down_proj.

    In ten runs with different adapters and prompts the error was 0.0012 to 0.0038. In runs with known scales of the
    rows it was 0.0019 to 0.0052.
    """
    with tempfile.TemporaryDirectory() as scratch:
        traffic = prompt_traffic(Path(scratch))
        claims = substitute.SUBSTITUTE.attack(traffic.view, traffic.public, scaled(traffic.view))
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    wanted = {layer: delta for layer, delta in traffic.deltas.items() if not layer.endswith(_TRAINED_TOGETHER)}
    del wanted["model.layers.1.mlp.down_proj"]  # its output goes to a head that the tenant keeps
    worst = max(
        float((got[layer] - delta).norm() / delta.norm()) if layer in got else 1.0 for layer, delta in wanted.items()
    )
    return ControlResult(
        "substitute", "no mask, hidden row scales", "largest relative error", worst, 0.05, smaller_wins=True
    )


# ---- traffic of a training step, gradient-view ----------------------------------------------------------------------

BATCH_SIZE, NUM_STEP_TOKENS, NUM_PROMPT_TOKENS = 12, 8, 3


@dataclass(frozen=True)
class StepTraffic:
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


def step_traffic(folder: Path, name: str = "tiny-llama") -> StepTraffic:
    """Makes the traffic of one prompt and of one training batch, forward and backward. The prompt is the beginning of
    the batch's first sequence. The first two rows and the last row of each sequence have no label.

    Args:
        folder: a folder for the model and the recording.
        name: the model's name, one of TINY_MODELS (attacks/victim/names.py).
    """
    from transformers import AutoModelForCausalLM

    from provider.model.load import load, resolve
    from provider.model.weights import serve_model

    path = models.make(name, folder / "model")
    manifest = serve_model(load(resolve(str(path))), "native").manifest
    public = describe(AutoModelForCausalLM.from_pretrained(path), manifest)
    adapted, kept = _adapted(AutoModelForCausalLM.from_pretrained(path), manifest)
    generator = torch.Generator().manual_seed(11)
    low = len(models.SPECIAL)
    ids = torch.randint(low, len(public.embedding), (BATCH_SIZE, NUM_STEP_TOKENS), generator=generator)
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
    return StepTraffic(view, public, ids.flatten().tolist(), targets.flatten().tolist(), gradients, _deltas(adapted))


def _adapted(model: Any, manifest: Manifest) -> tuple[Any, _Kept]:
    """Returns the model with a LoRA adapter whose matrix B is not zero, and the object in which its layers keep their
    inputs and gradients. A backward pass also computes the gradients of the base weights."""
    from peft import LoraConfig, get_peft_model

    with quiet_transformers():
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


def share_right(traffic: StepTraffic, fact: str) -> float:
    """Returns the share of the batch's tokens, or labels, that the adversary names correctly; 0 without a claim."""
    wanted = {TOKENS: traffic.token_ids, LABELS: traffic.labels}[fact]
    for claim in GRADIENT_VIEW.attack(traffic.view, traffic.public, None):
        if isinstance(claim, StolenFact) and claim.name == fact:
            named = [int(part) for part in str(claim.value).split(",")]
            return sum(one == other for one, other in zip(named, wanted, strict=False)) / len(wanted)
    return 0.0


def gradient_view_control() -> ControlResult:
    """Runs the adversary on one training step without a mask. The result's value is the share of the batch's tokens, or
    of its labels, that the adversary names rightly, whichever is smaller."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = step_traffic(Path(folder))
        value = min(share_right(traffic, TOKENS), share_right(traffic, LABELS))
    return ControlResult(
        GRADIENT_VIEW.name, "no mask, one training step of 12 rows of 8 tokens", "share of tokens and labels right",
        value, 1.0, smaller_wins=False,
    )  # fmt: skip


# ---- gradient-equations ---------------------------------------------------------------------------------------------
#
# Runs `gradient-equations` on an unmasked training step. The adversary must recover the change of both down_proj
# layers.


def down_errors(traffic: StepTraffic, opened: Opened | None = None) -> dict[str, float]:
    """Returns the relative error of the claimed change of each down_proj by layer name; 1 if nothing is claimed.

    Args:
        traffic: the training step to attack.
        opened: unmasked rows that the adversary uses in place of the recorded ones; None stands for the recorded ones.
    """
    claims = GRADIENT_EQUATIONS.attack(traffic.view, traffic.public, opened)
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    found = {}
    for block in traffic.public.blocks:
        wanted = traffic.deltas[block.down.name]
        if block.mlp_norm.bias is not None:  # a LayerNorm removes the mean of every row
            wanted = wanted - wanted.mean(1, keepdim=True)
        delta = got.get(block.down.name, torch.zeros_like(wanted))
        found[block.down.name] = float((delta - wanted).norm() / wanted.norm())
    return found


def gradient_equations_control() -> ControlResult:
    """Computes the largest relative error of the claimed changes of down_proj layers, over tiny-llama and tiny-gpt2."""
    worst = 0.0
    for name in ("tiny-llama", "tiny-gpt2"):
        with tempfile.TemporaryDirectory() as folder:
            worst = max(worst, *down_errors(step_traffic(Path(folder), name)).values())
    return ControlResult(
        GRADIENT_EQUATIONS.name, "no mask, float, one training step of 12 rows of 8 tokens",
        "largest relative error of down", worst, 1e-3, smaller_wins=True,
    )  # fmt: skip
