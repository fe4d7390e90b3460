"""Saves random PEFT adapters of every kind that the adapter store keeps as PEFT's modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model

from runtime.loading import loading

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA with biases": ("LORA", {"r": 4, "lora_alpha": 6, "lora_bias": True, "rank_pattern": {"q_proj": 2}}),
    "IA3": ("IA3", {}),
    "LoHa": ("LOHA", {"r": 4, "alpha": 6, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "LoKr": ("LOKR", {"r": 4}),
    "LoKr of two products": ("LOKR", {"r": 2, "decompose_both": True, "decompose_factor": 4}),
    "VeRA": ("VERA", {"r": 8}),
    "VeRA without its projections": ("VERA", {"r": 8, "save_projection": False, "projection_prng_key": 7}),
    "PVeRA": ("PVERA", {"r": 8}),
    "RandLoRA": ("RANDLORA", {"r": 4}),
    "RandLoRA without its bases": ("RANDLORA", {"r": 4, "save_projection": False, "sparse": True}),
    "OFT": ("OFT", {"oft_block_size": 8}),
    "OFT by rank": ("OFT", {"r": 4, "oft_block_size": 0, "block_share": True, "use_cayley_neumann": False}),
    "OFT within bounds": ("OFT", {"oft_block_size": 4, "coft": True, "eps": 0.5}),
    "BOFT": ("BOFT", {"boft_block_size": 4}),
    "BOFT of two factors": ("BOFT", {"boft_block_size": 0, "boft_block_num": 4, "boft_n_butterfly_factor": 2}),
    "FourierFT": ("FOURIERFT", {"n_frequency": 50, "n_frequency_pattern": {"v_proj": 30}}),
    "WaveFT": ("WAVEFT", {"n_frequency": 50, "wavelet_family": "db2"}),
    "VB-LoRA": ("VBLORA", {"r": 2, "num_vectors": 8, "vector_length": 8}),
    "GraLoRA": ("GRALORA", {"r": 4, "hybrid_r": 2}),
    "MiSS": ("MISS", {"r": 4}),
    "MiSS, small": ("MISS", {"r": 4, "init_weights": "mini", "mini_r": 4}),
    "BEFT": ("BEFT", {}),
    "C3A": ("C3A", {"block_size": 8, "block_size_pattern": {"v_proj": 4}}),
    "RoAd": ("ROAD", {"group_size": 8, "variant": "road_2"}),
    "HRA": ("HRA", {"r": 4}),
    "HRA, orthogonal": ("HRA", {"r": 3, "apply_GS": True}),
    "DEFT": ("DEFT", {"r": 4}),
    "DEFT, scaled": ("DEFT", {"r": 4, "alpha": 8, "decomposition_method": "qr"}),
    "DEFT without injection": ("DEFT", {"r": 4, "para": True}),
    "DeLoRA": ("DELORA", {"r": 4, "rank_pattern": {"q_proj": 2}}),
    "TinyLoRA": ("TINYLORA", {"r": 2, "u": 4, "weight_tying": 0.5}),
    "TinyLoRA with its matrices": ("TINYLORA", {"r": 2, "u": 4, "save_projection": True}),
    "AdaLoRA": ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100}),
    "AdaLoRA of fewer ranks": ("ADALORA", {"init_r": 4, "target_r": 2, "total_step": 100}),
}  # fmt: skip
"""An example of each kind by its title: `peft_type`, and settings."""
OF_CONV1D = (
    "LoRA with biases",
    "IA3", "VeRA", "VeRA without its projections", "PVeRA", "RandLoRA", "RandLoRA without its bases", "FourierFT",
    "WaveFT", "VB-LoRA", "GraLoRA", "AdaLoRA", "AdaLoRA of fewer ranks", "DEFT", "DEFT, scaled",
    "DEFT without injection", "TinyLoRA", "TinyLoRA with its matrices",
)  # fmt: skip
"""The examples that PEFT makes for Conv1D."""
TARGETS = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn", "c_proj")}
"""The layers that examples change, by kind of model. q_proj and v_proj share a call to the provider."""


def save_kind(model: Any, kind: str, folder: Path, title: str, seed: int, **changes: Any) -> Path:
    """Saves an adapter by PEFT, untrained: random numbers are added to what training would change.

    Args:
        model: the base model.
        kind: llama or gpt2.
        folder: where the adapter is saved.
        title: a key of `EXAMPLES`.
        seed: the seed of the random numbers.
        changes: settings beside those of the example.
    """
    peft_type, settings = EXAMPLES[title]
    targets = list(TARGETS[kind])
    own: dict[str, Any] = {"target_modules": targets, "task_type": "CAUSAL_LM", **settings, **changes}
    if peft_type == "IA3":
        own.setdefault(
            "feedforward_modules", [each for each in own["target_modules"] if each in ("down_proj", "c_proj")]
        )
    with loading():
        torch.manual_seed(seed)
        adapted = get_peft_model(copy.deepcopy(model), PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**own))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    if title == "AdaLoRA of fewer ranks":
        adapted.peft_config["default"].rank_pattern = {
            f"{name}.lora_E.default": [at % 3 > 0 for at in range(4)]
            for name, module in adapted.base_model.model.named_modules()
            if hasattr(module, "lora_E") and name.endswith(targets[0])
        }
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder
