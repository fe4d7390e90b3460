"""Makes a tiny chat model with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import make_tiny

SPECIAL = ["<pad>", "<s>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>"]
"""Tokens that stand for no character. The id of a token is its position in this list."""
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that puts a role token before each message and an end token after it."""


def character_tokenizer(template: str | dict[str, str] | None = TEMPLATE) -> Any:
    """Returns a tokenizer for which each character is one token, with one chat template or several with names."""
    pieces = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="<|end|>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


def make_chat_model(
    folder: Path, kind: str = "llama", template: str | dict[str, str] | None = TEMPLATE, seed: int = 0
) -> Path:
    """Saves a random model with its tokenizer to `folder`, and returns `folder`."""
    make_tiny(kind, folder, seed)
    character_tokenizer(template).save_pretrained(folder)
    return folder
