"""Holds the int8 weights of all groups in a file, for tenants that may fetch them (`weight_bytes_per_day`).

A tenant that fetches a group gets W̃ in row-major order, one byte a number, and then α as little-endian float32: the
bytes over which the group's digest in the manifest is made.

The file is apart from the weights that compute, since these may lie in other processes or on an accelerator. It exists
only if the operator lets a tenant fetch weights, and has about the size of the int8 weights.

Guarantees: the file has no name, so it disappears however the process ends. Several threads may read it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError
from wire.limits import CHUNK_BYTES


def group_bytes(group: ServedGroup) -> Iterator[memoryview]:
    """Yields the bytes of a group's weight in chunks of at most CHUNK_BYTES."""
    for tensor in (group.quantised, group.alpha):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


class WeightFile:
    """Holds the weights of all groups, one after the other."""

    def __init__(self, groups: Sequence[ServedGroup], parent: Path | None) -> None:
        """Writes the weights.

        Args:
            groups: all groups of the model, in the order of their ids.
            parent: the folder of the file; None for the system's folder of temporary files.

        Raises:
            ConfigurationError: the disk is full or cannot be written.
        """
        try:
            with contextlib.ExitStack() as undo:  # A file that is left to the collector would fail there again.
                self._file = undo.enter_context(tempfile.TemporaryFile(dir=parent))
                self._starts = [0]
                for group in groups:
                    for chunk in group_bytes(group):
                        self._file.write(chunk)
                    self._starts.append(self._file.tell())
                self._file.flush()
                undo.pop_all()
        except OSError as exc:
            raise ConfigurationError(
                f"cannot write the weights that tenants may fetch under {parent or tempfile.gettempdir()}: "
                f"{exc.strerror}; free some space, or leave weight_bytes_per_day out of tenant_limits"
            ) from exc

    def read(self, group: int) -> Iterator[bytes]:
        """Yields the bytes of a group's weight in chunks of at most CHUNK_BYTES."""
        offset, end = self._starts[group], self._starts[group + 1]
        while offset < end:
            chunk = os.pread(self._file.fileno(), min(CHUNK_BYTES, end - offset), offset)
            if not chunk:
                return  # The disk has lost it, and the tenant notices that bytes are missing.
            offset += len(chunk)
            yield chunk

    def close(self) -> None:
        """Frees the disk space."""
        self._file.close()
