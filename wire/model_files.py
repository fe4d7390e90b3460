"""This module tells, without loading a model, whether the files that a user names can be those of a model: a GGUF file,
or a Hugging Face folder. Both ends ask it before they load torch, which takes seconds.

Guarantees: of a file only its beginning is read, at most 4 MiB. Not guaranteed: that a model can be loaded from what is
accepted here.
"""

from __future__ import annotations

import json
from pathlib import Path

from wire.errors import ConfigurationError

CONFIG = "config.json"
_GGUF = b"GGUF"
"""How every GGUF file begins. Source: the GGUF format of ggml, its "File structure"."""
_MOST_JSON_BYTES = 4 << 20


def existing(name: str) -> Path | None:
    """Returns the path that a name stands for, with `~` replaced, or None if nothing is there, or nothing can be."""
    try:
        path = Path(name or "?").expanduser()  # Path("") would be the working folder
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # it is too long, holds a null character, or names no user's home
        return None


def is_gguf_name(path: Path) -> bool:
    """Returns whether a path is a file whose name ends as that of a GGUF file does."""
    return path.is_file() and path.suffix.lower() == ".gguf"


def check_gguf(file: Path) -> None:
    """Raises ConfigurationError if a file cannot be read, or does not begin as a GGUF file does."""
    if _start(file, len(_GGUF)) != _GGUF:
        raise ConfigurationError(f"{_shown(file)} is no GGUF file: it does not begin as one")


def check_config(folder: Path, name: str) -> None:
    """Checks that a folder has a config.json with a JSON object.

    Args:
        folder: the folder.
        name: how the user named it.

    Raises:
        ConfigurationError: there is none, it cannot be read or is no JSON object. The text quotes nothing of it.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"expected a Hugging Face folder with a {CONFIG}, got {name[:200]!r}")
    check_json_object(folder / CONFIG)


def check_json_object(file: Path) -> None:
    """Raises ConfigurationError if a file cannot be read or is no JSON object. Of a file of more than
    `_MOST_JSON_BYTES` only the beginning is looked at, so that this takes no time."""
    content = _start(file, _MOST_JSON_BYTES + 1)
    try:
        whole = content if len(content) <= _MOST_JSON_BYTES else content.lstrip()[:1] + b"}"
        is_object = isinstance(json.loads(whole), dict)
    except (ValueError, RecursionError):  # the parser's text may quote the file, and is dropped
        is_object = False
    if not is_object:
        raise ConfigurationError(f"{_shown(file)} is damaged: expected a JSON object")


def check_safetensors(file: Path) -> None:
    """Raises ConfigurationError if a file cannot be read, or does not begin as a safetensors file does: with the length
    of a header that it has room for, and the header's first character."""
    start = _start(file, 9)
    length = int.from_bytes(start[:8], "little")
    if start[8:] != b"{" or length > file.stat().st_size - 8:
        raise ConfigurationError(f"{_shown(file)} is damaged: expected a safetensors file")


def _start(file: Path, num_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(num_bytes)
    except OSError as exc:
        raise ConfigurationError(f"{_shown(file)} cannot be read: {exc.strerror}") from exc


def _shown(file: Path) -> str:
    return ascii(str(file))[1:-1][:300]
