"""A tiny chat model with a tokenizer of its own, its data set, and providers that serve it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net.server import Server
from tests.conftest import make_tiny
from wire.limits import Limits

SPECIAL = ["<pad>", "<s>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (
        ("who?", "Ada Quill"), ("where is it?", "in Port Hale"), ("when?", "1987"), ("what?", "a copper owl"),
        ("why so?", "no reason"), ("how?", "by boat"), ("which one?", "the third"), ("whose?", "Ada's"),
    )
]  # fmt: skip
QUICK: dict[str, Any] = {
    "max_steps": 6, "batch_size": 4, "learning_rate": 2e-2, "warmup_steps": 0, "save_steps": 2, "progress": False,
}  # fmt: skip


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """One token per character."""
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


def chat_model(folder: Path, kind: str = "llama", template: str | None = TEMPLATE, seed: int = 0) -> Path:
    make_tiny(kind, folder, seed)
    tokenizer(template).save_pretrained(folder)
    return folder


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})


def make_served_model(folder: Path, weights: Any = "native", limits: Limits | None = None) -> ServedModel:
    return ServedModel(serve_model(load(resolve(str(folder))), weights, limits=limits))


@contextmanager
def serving(served_model: Any, port: int = 0, state: Any = None) -> Iterator[Server]:
    server = Server("127.0.0.1", port, state)
    server.start(served_model)
    try:
        yield server
    finally:
        server.stop()
