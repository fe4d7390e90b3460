"""Makes the tiny random models that are attacked, and loads other checkpoints as the provider does.

The quick profile's model has a tokenizer, in which each character is one token, and private facts that a victim learns.
It is big enough for every adversary to get as many equations as it needs, and small enough for an attack on all masks
to take less than a minute. Controls whose traffic needs real layers use a smaller model. Any checkpoint is loaded with
the provider's own code, because the adversary is the provider.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attacks.seen.public_model import PublicModel, describe
from runtime.loading import quiet_transformers
from wire.manifest import Manifest

# ---- the quick profile's model, with a tokenizer --------------------------------------------------------------------

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
    """Saves the model with this name, one of TINY_MODELS (attacks/victim/names.py), and its tokenizer in `folder`, and
    returns `folder`. The weights are larger than those that transformers would draw, so that adapters have visible
    effects."""
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


# ---- a smaller one for controls, without a tokenizer ----------------------------------------------------------------


@functools.cache
def tiny_model(kind: str = "llama") -> Any:
    """Returns a random transformers model on the CPU, with 2 blocks, hidden size 32 and a vocabulary of 64 tokens.

    The standard deviation of its weights is 0.15, not transformers' 0.02, so that adapters and attention have visible
    effects. Every call with the same `kind` returns the same object, so callers must not change it.

    Args:
        kind: `llama`; any other text gives a GPT-2 model.
    """
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(0)
    if kind == "llama":
        config: Any = LlamaConfig(
            vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
        )  # fmt: skip
    else:
        config = GPT2Config(
            vocab_size=64, n_embd=HIDDEN, n_inner=48, n_layer=2, n_head=4, n_positions=256, initializer_range=0.15,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_manifest(kind: str, weights: str, folder: Path) -> Manifest:
    """Saves the model of `tiny_model` in `folder`, and returns the manifest that a provider of the model announces.

    Args:
        kind: the kind of model, as in `tiny_model`.
        weights: `native` for the model's own weights; any other text gives int8.
        folder: the folder to save to; it is made if it is missing.
    """
    from provider.model.load import load, resolve
    from provider.model.weights import serve_model

    with quiet_transformers(), _without_tokenizer():
        tiny_model(kind).save_pretrained(folder)
        loaded = load(resolve(str(folder)))
    return serve_model(loaded, "native" if weights == "native" else "int8").manifest


@contextlib.contextmanager
def _without_tokenizer() -> Iterator[None]:
    """Drops the provider's warning that the model has no tokenizer: what is sent here is made of token ids."""
    logger = logging.getLogger("provider.model.load")

    def is_other(record: logging.LogRecord) -> bool:
        return "has no tokenizer" not in record.msg

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def tiny_public(kind: str, manifest: Manifest) -> PublicModel:
    """Returns what adversaries know of the model of `tiny_model`: its public weights and structure."""
    return describe(tiny_model(kind), manifest)


# ---- any checkpoint -------------------------------------------------------------------------------------------------


def load_public(name: str, manifest: Manifest) -> tuple[Any, PublicModel]:
    """Loads a model for a recording.

    Args:
        name: the model, as `provider serve --model` takes it.
        manifest: the recording's manifest.

    Returns:
        transformers' model, and what adversaries know of it.

    Raises:
        ConfigurationError: there is no such model, or the recording is of another one.
    """
    from provider.model.load import load, resolve

    loaded = load(resolve(name))
    return loaded.model, describe(loaded.model, manifest, loaded.tokenizer)
