"""Makes the inputs of the distinguisher game: one of two texts, or one of two adapters over the same text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from attacks.controls.tiny import tiny_model
from noise import params
from noise.scheme import GroupSpec
from wire.errors import ConfigurationError
from wire.ring.quantise import digest, max_norms, quantise

SECRETS = ("prompt", "adapter")
PARAMETERS = params.PARAMETERS["default"]
"""The parameters of the game's masks. Each message fills a block of mask rows under these parameters."""
_SEQUENCES = 2


@dataclass(frozen=True)
class Choice:
    """Holds one group (layers that read the same input) and the two inputs between which the game's coin
    chooses.

    Attributes:
        group: the facts about the group that a mask scheme needs.
        weight: W̃, the int8 weight, shape (in_features, out_features).
        inputs: the two inputs, each float32, shape (512, in_features).
    """

    group: GroupSpec
    weight: torch.Tensor
    inputs: tuple[torch.Tensor, torch.Tensor]


def choice(secret: str) -> Choice:
    """Returns the inputs for a secret: two texts at the first layer, or one text under two adapters at the second
    block's first layer.

    Raises:
        ConfigurationError: there is no such secret.
    """
    if secret not in SECRETS:
        raise ConfigurationError(f"the secret is one of {', '.join(SECRETS)}, got {secret!r}")
    generator = torch.Generator().manual_seed(11)
    shape = 2, _SEQUENCES, PARAMETERS.ring_degree // _SEQUENCES
    texts = torch.randint(64, shape, generator=generator)
    if secret == "prompt":  # noqa: S105 - the name of a game, not a secret
        block, models = 0, (tiny_model(), tiny_model())
    else:
        block, models = 1, (_adapted(1), _adapted(2))
        texts[1] = texts[0]
    first, second = (_inputs(model, text, block) for model, text in zip(models, texts, strict=True))
    attention = tiny_model().model.layers[block].self_attn
    parts = [quantise(getattr(attention, name).weight.detach().t()) for name in ("q_proj", "k_proj", "v_proj")]
    weight, alpha = torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts])
    num_in, num_out = weight.shape
    group = GroupSpec(0, num_in, num_out, *max_norms(weight), alpha, digest(weight, alpha))
    return Choice(group, weight, (first, second))


def _adapted(seed: int) -> Any:
    """Returns a copy of the tiny model with a random LoRA of rank 4, whose ΔW is about as large as that of a trained
    one."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(seed)
    adapted: Any = get_peft_model(
        copy.deepcopy(tiny_model()), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.base_model.model


def _inputs(model: Any, token_ids: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the input of a block's first layers, float32, shape (num_rows, hidden)."""
    seen: list[torch.Tensor] = []
    module = model.model.layers[block].self_attn.q_proj
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        with torch.no_grad():
            model(input_ids=token_ids)
    finally:
        hook.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])  # (sequences, tokens, hidden) to (rows, hidden)
