"""This module names the two files of an adapter, and tells without loading torch whether a folder that the user names
has them. tenant_sdk/serving/adapters/reader.py reads them.

Guarantees: of the weights only the first bytes are read here; an error quotes nothing of a file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tenant_sdk.plain_values import adapter_folder
from wire.errors import ConfigurationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Finds the names that an adapter may have, none of which leads out of a folder."""
MAX_HEADER_BYTES = 8 << 20
"""The longest header of weights that is read, 8 MiB. A tensor takes about 150 bytes of header, and the most tensors of
one adapter take 3 MB."""
MAX_CONFIG_BYTES = 1 << 20
"""The longest adapter_config.json that is read, 1 MiB. A file with a pattern for each layer of a large model takes
about 100 kB."""
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


def check_adapter_files(adapter: str | Path) -> None:
    """Checks that an adapter folder has both files, that its settings are a JSON object, and that its weights begin as
    a safetensors file does.

    Raises:
        ConfigurationError: it is not so, or a file cannot be read.
    """
    folder = adapter_folder(adapter)
    name = str(folder)
    try:
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise ConfigurationError(what_is_missing(name, os.listdir(folder), file == CONFIG))
        with (folder / CONFIG).open("rb") as config, (folder / WEIGHTS).open("rb") as weights:
            check_config_bytes(name, content := config.read(MAX_CONFIG_BYTES + 1))
            json_object(name, content)
            header_bytes(name, weights.read(8), os.fstat(weights.fileno()).st_size)
    except OSError as exc:
        raise ConfigurationError(f"the adapter {name} cannot be read: {exc.strerror}") from exc


def what_is_missing(name: str, files: Collection[str], config: bool) -> str:
    """Returns the error text for an adapter that lacks one of the two files.

    Args:
        name: the adapter's name, for error messages.
        files: the names of the files in its folder.
        config: whether it lacks the settings; otherwise it lacks the weights.
    """
    if config:
        return f"the adapter {name} has no {CONFIG} that is a regular file and can be read: is it an adapter folder?"
    if any(file in files for file in _PICKLES):
        return f"the adapter {name} keeps its weights in a pickle, which is not opened: save it as safetensors"
    return f"the adapter {name} has no {WEIGHTS} that is a regular file and can be read"


def check_config_bytes(name: str, content: bytes) -> None:
    """Raises ConfigurationError if an adapter has more bytes of settings than are read."""
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"the adapter {name} has more than {MAX_CONFIG_BYTES} bytes of settings")


def json_object(name: str, content: bytes) -> dict[str, Any]:
    """Returns the settings of an adapter, unchecked; raises ConfigurationError if they are no JSON object."""
    try:
        config = json.loads(
            content.decode()
        )  # From bytes, `loads` would also accept UTF-16 and UTF-32, which PEFT does not accept.
    except (ValueError, RecursionError):  # `from None`: a parser's text may quote the file
        config = None
    if not isinstance(config, dict):
        raise ConfigurationError(f"the adapter {name} has an adapter_config.json that is no JSON object") from None
    return config


def header_bytes(name: str, start: bytes, file_bytes: int) -> int:
    """Returns the length of the header of a file of weights, in bytes.

    Args:
        name: the adapter's name, for error messages.
        start: the first 8 bytes of the file.
        file_bytes: the size of the whole file.

    Raises:
        ConfigurationError: the file is not a safetensors file, or its header is too long.
    """
    length = int.from_bytes(start, "little") if len(start) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ConfigurationError(f"the adapter {name} has an adapter_model.safetensors that is no such file")
    return length
