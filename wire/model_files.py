"""This module tells, without loading a model, whether the files that a user names can be those of a model: a GGUF file,
a Hugging Face folder, or a hub id. Both ends ask it before they load torch, which takes seconds.

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


HUB_S = 5.0
"""The seconds that a hub may take to say that it can be reached; a slow one is left to the download."""
_UNREACHABLE = frozenset({"ConnectError", "ConnectTimeout", "ConnectionError"})
"""The names of errors of HTTP libraries, one of which huggingface_hub uses, for a connection that was not made."""


def is_cached(hub_id: str) -> bool:
    """Returns whether any file of `owner/model[@revision]` is cached here."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, "models--" + hub_id.partition("@")[0].replace("/", "--")).is_dir()


def check_hub_answers(what: str, hub_id: str) -> None:
    """Checks that the hub can be reached from which a model is to be downloaded that is not cached here. Whether it has
    the model is found out by the download.

    Args:
        what: what the model is to the user, such as "checkpoint".
        hub_id: its hub id.

    Raises:
        ConfigurationError: no connection to the hub can be made.
    """
    if is_cached(hub_id):
        return
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT

    try:
        get_session().head(ENDPOINT, timeout=HUB_S)
    except Exception as exc:  # noqa: BLE001 - the classes are those of a library that huggingface_hub chooses
        if _UNREACHABLE & {each.__name__ for each in type(exc).__mro__}:
            raise ConfigurationError(not_from_hub(what, hub_id, exc)) from None


def not_from_hub(what: str, hub_id: str, exc: Exception) -> str:
    """Returns the error text for a model that the hub did not give although HF_HUB_OFFLINE=0 allows downloads."""
    advice = next(
        (_HUB_ADVICE[each.__name__] for each in type(exc).__mro__ if each.__name__ in _HUB_ADVICE),
        "the hub cannot be reached: check the network, or name a folder or a GGUF file on this machine",
    )
    return f"the {what} {hub_id[:200]!r} is not cached here, HF_HUB_OFFLINE=0 allows its download, and {advice}"


_HUB_ADVICE = {
    "GatedRepoError": "the hub gives it to known users only: accept its terms there, and set HF_TOKEN",
    "RevisionNotFoundError": "the hub has no such revision of it: check what stands after the @",
    "RepositoryNotFoundError": "the hub has no such model, or a private one: check its name, or set HF_TOKEN",
}
"""What is to be done about an error of huggingface_hub, by its class."""


def _start(file: Path, num_bytes: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(num_bytes)
    except OSError as exc:
        raise ConfigurationError(f"{_shown(file)} cannot be read: {exc.strerror}") from exc


def _shown(file: Path) -> str:
    return ascii(str(file))[1:-1][:300]
