"""Writes the weights of some groups to a safetensors file, which several processes of this machine map and share.

Guarantees: weights that are read from the file agree with their digests in the manifest. The file's name is removed as
soon as the file is written, so that the file's space is freed when the last process that uses the file ends, even if
that process is killed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError
from wire.manifest import GroupInfo
from wire.ring.quantise import digest

_PARTS = ("quantised", "alpha", "bias", "native")


def write_weights(groups: Iterable[ServedGroup], parent: Path | None) -> int:
    """Writes the weights of groups to a file, and removes the file's name.

    Args:
        groups: the groups whose weights are written.
        parent: the folder for the file; None is the system's folder of temporary files.

    Returns:
        The file's descriptor, which the caller must close.

    Raises:
        ConfigurationError: the disk is full, or cannot be written.
    """
    tensors, infos = {}, []
    for group in groups:
        infos.append({"info": group.info.model_dump(mode="json"), "fingerprint": group.fingerprint()})
        held = {name: getattr(group, name) for name in _PARTS}
        tensors.update({f"{group.info.id}.{name}": one for name, one in held.items() if one is not None})
    try:
        descriptor, name = tempfile.mkstemp(prefix="veilbase-shard-", dir=parent)
        os.close(descriptor)
        try:
            save_file(tensors, name, {"groups": json.dumps(infos)})
            # The file is opened after it was written, since `save_file` may replace the file of this name.
            return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.unlink(name)
    except (OSError, SafetensorError) as exc:
        # The error's text describes only this machine's disk, and quotes no weights.
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)[:200]
        raise ConfigurationError(f"a shard's weights cannot be written to disk: {reason}") from exc


def read_weights(descriptor: int) -> dict[int, ServedGroup]:
    """Maps the groups in a file that `write_weights` wrote; processes that map the same file share one copy in memory.

    Args:
        descriptor: the file's descriptor.

    Returns:
        The groups by id.

    Raises:
        ConfigurationError: the file cannot be read, or its weights do not agree with their digests.
    """
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
            names = set(file.keys())
            groups = {}
            for one in json.loads(file.metadata()["groups"]):
                info = GroupInfo.model_validate(one["info"])
                groups[info.id] = _group(info, {part: _tensor(file, names, info, part) for part in _PARTS})
                if groups[info.id].fingerprint() != one["fingerprint"]:
                    raise ConfigurationError(f"the weights of group {info.id} are not those that were written")
            return groups
    except (OSError, SafetensorError, ValueError, KeyError) as exc:
        raise ConfigurationError(f"a shard's weights cannot be read: {type(exc).__name__}") from exc


def _tensor(file: Any, names: set[str], info: GroupInfo, part: str) -> torch.Tensor | None:
    name = f"{info.id}.{part}"
    return file.get_tensor(name) if name in names else None


def _group(info: GroupInfo, parts: dict[str, torch.Tensor | None]) -> ServedGroup:
    quantised, alpha = parts["quantised"], parts["alpha"]
    if quantised is None or alpha is None or digest(quantised, alpha) != info.digest:
        raise ConfigurationError(f"the weights of group {info.id} are not those of the manifest")
    return ServedGroup(info, quantised, alpha, parts["bias"], parts["native"])
