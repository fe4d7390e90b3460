"""Makes the random models that the benchmark serves, and names the LoRA configurations that its clients train.

The weights are random, which changes neither times nor memory. The vocabulary is small and its head is tied to the
embedding, so that almost all parameters are in layers that a provider serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.loading import quiet_transformers

VOCABULARY = 8192
SHAPES: dict[str, dict[str, Any]] = {
    # the layers of Llama-3.2-1B: 973 million parameters in linear layers
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # a model for trials, whose figures mean nothing
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
"""The sizes of the models, by the names that `--model` takes."""


@dataclass(frozen=True)
class _Lora:
    """Describes a LoRA adapter: its rank, and the layers that it is on, as PEFT names them."""

    rank: int
    targets: str | tuple[str, ...]


DEFAULT_LORA = _Lora(16, "all-linear")
LORAS = {
    "LoRA 1": _Lora(8, ("q_proj", "v_proj")),
    "LoRA 2": _Lora(64, ("q_proj", "v_proj")),
    "LoRA 3": _Lora(8, "all-linear"),
    "LoRA 4": _Lora(64, "all-linear"),
}
"""Four adapters, small and large, on few and on all layers. They are our own choice, since the Symbiosis paper's Table
2 was not at hand."""


def make_model(shape: str, folder: Path) -> Path:
    """Saves a random Llama model in bfloat16 to a folder, unless the folder has a complete one, and returns the folder.

    Args:
        shape: a name of SHAPES.
        folder: the folder to fill.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if (folder / "complete").exists():
        return folder
    config = LlamaConfig(**SHAPES[shape], vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=2048)
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "complete").touch()
    return folder
