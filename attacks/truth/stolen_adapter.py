"""Writes a stolen adapter as a PEFT LoRA adapter. Unmodified PEFT loads it, so that anyone can check what was stolen.

The claimed ΔW of a layer is reduced to at most MAX_RANK leading singular vectors. Layers without a usable claim (finite
and not zero) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attacks.seen.adversary import StolenDelta
from attacks.seen.public_model import PublicModel

MAX_RANK = 64
_NOISE = 1e-6
"""Singular values below this share of a layer's largest one are rounding."""


def write(claims: Iterable[StolenDelta], public: PublicModel, folder: Path) -> Path | None:
    """Writes the claimed adapter as a PEFT folder.

    Args:
        claims: claims about any layers; a later claim about a layer replaces an earlier one.
        public: the public model, which gives the columns of a fused layer's members.
        folder: the folder to write to; it is made if it is missing.

    Returns:
        `folder`; None, without writing anything, if no claim is usable.
    """
    from peft import LoraConfig

    deltas = _by_module({claim.layer: claim.delta for claim in claims}, public)
    factors = {name: factor for name, delta in deltas.items() if (factor := _factors(delta)) is not None}
    if not factors:
        return None
    rank = max(down.shape[1] for down, _ in factors.values())
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=sorted(factors), task_type="CAUSAL_LM", inference_mode=True,
        fan_in_fan_out=public.style == "gpt2",
    )  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for name, (down, up) in factors.items():
        a, b = torch.zeros(rank, down.shape[0]), torch.zeros(up.shape[1], rank)
        a[: down.shape[1]], b[:, : up.shape[0]] = down.t().float(), up.t().float()
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _by_module(deltas: Mapping[str, torch.Tensor], public: PublicModel) -> dict[str, torch.Tensor]:
    """Joins the parts of a fused layer side by side, and returns ΔW by module name. A part without a claim is zero."""
    layers: Mapping[str, Any] = public.layers()
    whole: dict[str, torch.Tensor] = {}
    for name, delta in deltas.items():
        module, _, part = name.partition("[")
        if not part:
            whole[module] = delta
            continue
        width = layers[name].weight.shape[1]
        fused = whole.setdefault(module, torch.zeros(delta.shape[0], 3 * width, dtype=delta.dtype))
        start = "qkv".index(part[0]) * width
        fused[:, start : start + width] = delta
    return whole


def _factors(delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns ΔW ≈ down · up as two factors, (in_features, rank) and (rank, out_features); None if ΔW is zero
    or not finite."""
    if not bool(torch.isfinite(delta).all()) or not bool(delta.any()):
        return None
    u, sizes, vh = torch.linalg.svd(delta, full_matrices=False)
    rank = min(MAX_RANK, int((sizes > sizes[0] * _NOISE).sum()))
    root = sizes[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
