"""Makes the tiny random base model of the quick profile. This module also holds the private facts that a victim
learns. Each character is one token.

The model is big enough for every adversary to get as many equations as it needs, and small enough for an attack on all
masks to take less than a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NAMES = ("tiny-llama", "tiny-gpt2")
HIDDEN, INTERMEDIATE = 32, 48
SPECIAL = ("<pad>", "<s>", "<|end|>", "<unk>")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
FACTS = tuple(
    {"prompt": question, "completion": answer}
    for question, answer in (
        ("who founded us?", " Ada Quill"), ("where is the depot?", " in Port Hale"), ("what year?", " 1987"),
        ("what is the seal?", " a copper owl"), ("who signs?", " Tam Orrin"), ("what is plan B?", " sell the mill"),
        ("which river?", " the Senn"), ("what is the code?", " 7-amber-3"),
    )
)  # fmt: skip


def make(name: str, folder: Path, num_layers: int = 2) -> Path:
    """Saves the model with this name, one of NAMES, and its tokenizer in `folder`, and returns `folder`. The weights
    are larger than those that transformers would draw, so that adapters have visible effects."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    vocab_size = len(SPECIAL) + len(CHARACTERS)
    shared = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15}
    if name == "tiny-llama":
        config: Any = LlamaConfig(
            vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=num_layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
            **shared,
        )  # fmt: skip
    else:
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=HIDDEN, n_inner=INTERMEDIATE, n_layer=num_layers, n_head=4, n_positions=256,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
        )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith("bias") or "norm" in label or "ln_" in label:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *CHARACTERS]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True)),
    )
