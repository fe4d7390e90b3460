"""Passes requests, rows and weights between the provider's process and the processes of shards on the same machine.

Messages are sent over ZeroMQ. A request's message holds the call, the shape of the rows and the sizes of the shared
memory. Only the 48 bytes of a hint's seed are in the message itself.

The rows and the reply are in memory that two processes share: one process writes the rows, and the other reads them in
place. One of the two, the owner, enlarges the memory on demand, and sends the new size with the message about the rows.
The memory is anonymous (memfd_create).

The weights of a shard's groups are in a safetensors file, which several processes of this machine map and share.

Guarantees: shared memory leaves nothing behind, however the processes end. Weights that are read from the file agree
with their digests in the manifest. The file's name is removed as soon as the file is written, so that the file's space
is freed when the last process that uses the file ends, even if that process is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError, MalformedFrame
from wire.frame import FrameType, Header, parse
from wire.manifest import GroupInfo
from wire.ring.quantise import digest

_SIZES = struct.Struct("<QQ")
READY = [b"ready"]


def request(header: Header, request_bytes: int, reply_bytes: int, seed: bytes = b"") -> list[bytes]:
    """Returns the parts of the message for a request.

    Args:
        header: a REQUEST header with the number of the request, the call, and the numbers of rows and columns.
        request_bytes, reply_bytes: the sizes of the shared memory for the rows and for the reply.
        seed: the seed of the rows if the request is for a hint (the product of a public matrix and the weight), else
            empty.
    """
    return [header.pack(), _SIZES.pack(request_bytes, reply_bytes), seed]


def read_request(parts: Sequence[bytes]) -> tuple[Header, int, int, bytes]:
    """Reads a message that `request` made; returns the arguments that `request` was called with.

    Raises:
        MalformedFrame: the parts are not a message of `request`.
    """
    if len(parts) != 3 or len(parts[1]) != _SIZES.size:
        raise MalformedFrame("a message to a shard has three parts")
    request_bytes, reply_bytes = _SIZES.unpack(parts[1])
    return _header(parts[0]), request_bytes, reply_bytes, parts[2]


def reply(number: int, code: int = 0) -> list[bytes]:
    """Returns the message by which the shard's process replies to the provider's process. The message says that the
    product of request `number` is in shared memory or, if `code` is not 0, that the request failed with this error
    code."""
    return [Header(FrameType.ERROR if code else FrameType.REPLY, number, code=code).pack()]


def read_reply(parts: Sequence[bytes]) -> Header:
    """Reads a message that `reply` made; returns its header, which has the number of the request and the error code.

    Raises:
        MalformedFrame: the parts are not a message of `reply`.
    """
    if len(parts) != 1:
        raise MalformedFrame("a message of a shard has one part")
    return _header(parts[0])


def _header(part: bytes) -> Header:
    header, payload = parse(part)
    if payload:
        raise MalformedFrame("a header with a payload")
    return header


_LEAST_BYTES = 1 << 16
KEPT_BYTES = 64 << 20
"""The limit in bytes on the shared memory that is kept between requests; memory above the limit is freed after a
request."""


class SharedRows:
    """Maps the shared memory in one of the two processes. This class is not thread-safe. The processes must take turns:
    only the process that received the last message may use the rows."""

    def __init__(self, descriptor: int, num_bytes: int = 0) -> None:
        """Takes over the file descriptor of shared memory. The owner also maps the memory; the other process maps it
        later, by `follow`.

        Args:
            descriptor: the memory's file descriptor, which `close` closes.
            num_bytes: for the owner, the smallest size that the memory may have at the start; 0 for the other process.
        """
        self.descriptor = descriptor
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        if num_bytes:
            self.hold(num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedRows:
        """Creates new shared memory, and returns the object by which its owner uses the memory."""
        return cls(os.memfd_create("veilbase-rows", os.MFD_CLOEXEC), num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Enlarges the memory to at least `num_bytes`; only the owner may call this."""
        if num_bytes > self.num_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            os.ftruncate(self.descriptor, wanted)
            self.follow(wanted)

    def give_back(self) -> None:
        """Shrinks the memory to `KEPT_BYTES` if the memory is larger. Only the owner may call this, once neither
        process uses the rows any more."""
        if self.num_bytes > KEPT_BYTES:
            self._map = None
            os.ftruncate(self.descriptor, KEPT_BYTES)
            self.follow(KEPT_BYTES)

    def follow(self, num_bytes: int) -> None:
        """Maps the memory again if the owner has changed the memory's size to `num_bytes`."""
        if num_bytes != self.num_bytes:
            self._map = mmap.mmap(self.descriptor, num_bytes)
            self.num_bytes = num_bytes

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the memory, shape (num_rows, cols); `dtype` must have four bytes.

        Raises:
            ValueError: the memory is too small.
        """
        if num_rows * cols == 0:
            return torch.empty(num_rows, cols, dtype=dtype)
        if self._map is None:
            raise ValueError("no memory is mapped")
        return torch.frombuffer(self._map, dtype=dtype, count=num_rows * cols).view(num_rows, cols)

    def close(self) -> None:
        """Unmaps the shared memory and closes its file descriptor."""
        self._map = None
        os.close(self.descriptor)


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
