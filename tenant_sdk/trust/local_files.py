"""This module checks the files of a checkpoint or a tokenizer on this machine that the tenant trusts, as far as that is
possible without loading torch. tenant_sdk/trust/checkpoint.py reads them.

Guarantees: weights in pickles are refused, and no pickle is opened; an error quotes nothing of a file.
"""

from __future__ import annotations

import json
from pathlib import Path

from wire.built_in import BUILT_IN
from wire.errors import ConfigurationError
from wire.model_files import check_config, check_gguf, check_json_object, check_safetensors, is_gguf_name

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""The names of tokenizer files: a folder counts as a tokenizer if it has at least one of them."""
_KINDS = {"tokenizer": "a folder with tokenizer files"}
"""What a folder is expected to be, if not one of a whole model."""


def check_path(what: str, path: Path, name: str) -> None:
    """Checks a path that exists, as one to load a model or a tokenizer from.

    Args:
        what: `checkpoint` (which the tenant trusts), `tokenizer`, or `model` (of a provider in this process).
        path: a file or a folder.
        name: how the user named it.

    Raises:
        ConfigurationError: it is neither a GGUF file nor such a folder, or it is damaged.
    """
    if path.is_dir():
        {"checkpoint": checked_folder, "tokenizer": check_tokenizer_folder, "model": check_config}[what](path, name)
    elif is_gguf_name(path):
        check_gguf(path)
    else:
        raise no_such(what, name)


def no_such(what: str, name: str) -> ConfigurationError:
    """Returns the error for a name of a checkpoint, tokenizer or model that names none."""
    folder = _KINDS.get(what, "a Hugging Face folder")
    return ConfigurationError(
        f"cannot find the {what} {name[:200]!r}: expected {', '.join(BUILT_IN)}, a GGUF file, {folder}, or a hub id"
    )


def checked_folder(folder: Path, name: str) -> Path:
    """Returns the folder of a checkpoint, which has a config.json and safetensors.

    Raises:
        ConfigurationError: it lacks these, or keeps its weights in pickles.
    """
    check_config(folder, name)
    files = weight_files(folder)
    if not files:
        if any(path for pattern in PICKLES for path in folder.glob(pattern)):
            raise ConfigurationError(f"{name[:200]!r} keeps its weights in pickles, which are not opened: convert it")
        raise ConfigurationError(f"{name[:200]!r} holds no model.safetensors")
    for file in files:
        check_safetensors(file)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Returns the paths of the safetensors files that transformers would read, sorted by name."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise ConfigurationError(f"{index.name} of the trusted checkpoint cannot be read") from exc


def has_tokenizer_files(folder: Path) -> bool:
    """Returns whether a folder has a file of a tokenizer."""
    return any((folder / file).is_file() for file in _TOKENIZER_MARKS)


def check_tokenizer_folder(folder: Path, name: str) -> None:
    """Raises ConfigurationError if a folder has no file of a tokenizer, or one that should be JSON and is not."""
    if not has_tokenizer_files(folder):
        raise ConfigurationError(f"expected a folder with tokenizer files, got {name[:200]!r}")
    for mark in _TOKENIZER_MARKS:
        if mark.endswith(".json") and (folder / mark).is_file():
            check_json_object(folder / mark)
