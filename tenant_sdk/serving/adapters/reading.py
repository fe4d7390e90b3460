"""This module checks an adapter's two open files, and reads the weights once, tensor by tensor.

The store of adapters and `TenantClient.generate` both read adapters by this module, so that they refuse the same files
for the same reasons. `generate` takes more kinds of adapters than the store.

Guarantees: the bytes that are checked, hashed and used are the same. Reading takes no more memory than the largest
tensor. A file that changes during the reading is refused, if its times or size show the change.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tenant_sdk.serving.adapters.kinds import NotServed
from tenant_sdk.serving.adapters.peft_config import MAX_CONFIG_BYTES, parse_settings, read_settings
from tenant_sdk.serving.adapters.targets import Base
from tenant_sdk.serving.adapters.weights_file import (
    LoraFile,
    ModuleFile,
    OtherFile,
    StoredTensor,
    header_bytes,
    parse_any_weights,
    parse_weights,
)
from wire.errors import ConfigurationError

RACY_NS = 100_000_000
"""The nanoseconds after a change in which a file's stamp is not relied on, 0.1 s. A second change could have the same
time as the first, since the times of file systems advance in ticks of 1 to 10 ms."""

Stamp = tuple[tuple[int, int, int, int, int], ...]
"""The stamp of an adapter: device, inode, size, mtime and ctime of both files, which change if a file changes."""


@dataclass(frozen=True)
class Found:
    """Describes an adapter whose settings and header were checked, and whose weights have not been read.

    Attributes:
        name: the adapter's name.
        stamp: the stamp of the files, which tells a changed adapter from this one without reading the files.
        settled: whether the stamp can be relied on; see `RACY_NS`.
        contents: the adapter's layers, with the offsets of their tensors in the file.
    """

    name: str
    stamp: Stamp
    settled: bool
    contents: LoraFile | ModuleFile


def stamp_of(*files: int) -> Stamp:
    """Returns the stamp of open files."""
    stats = [os.fstat(file) for file in files]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)


def is_settled(stamp: Stamp) -> bool:
    """Returns True if the files' last change is long enough ago that another change would show in the stamp."""
    return all(time.time_ns() - max(each[3:]) > RACY_NS for each in stamp)


class OpenAdapter:
    """Reads an adapter of any kind from its open files.

    Attributes:
        stamp: the stamp of the files when they were opened.
    """

    def __init__(self, name: str, config: int, weights: int, base: Base, max_file_bytes: int) -> None:
        """Reads the adapter's settings and the header of its weights.

        Args:
            name: the adapter's name, for error messages.
            config, weights: the descriptors of the open files.
            base: the model that the adapter has to fit.
            max_file_bytes: the largest weights file that is read.

        Raises:
            ConfigurationError: a file is too large, or cannot be an adapter's.
        """
        self._name, self._files, self._base = name, (config, weights), base
        self.stamp = stamp_of(config, weights)
        self._file_bytes = self.stamp[1][2]
        if self._file_bytes > max_file_bytes:
            raise ConfigurationError(
                f"the adapter {name} has {self._file_bytes} bytes of weights: at most {max_file_bytes} fit"
            )
        self._settings = os.pread(config, MAX_CONFIG_BYTES + 1, 0)
        if len(self._settings) > MAX_CONFIG_BYTES:
            raise ConfigurationError(f"the adapter {name} has more than {MAX_CONFIG_BYTES} bytes of settings")
        start = os.pread(weights, 8, 0)
        self._header = os.pread(weights, header_bytes(name, start, self._file_bytes), 8)
        self._digest = hashlib.sha256(self._settings + start + self._header)

    def settings(self) -> dict[str, Any]:
        """Returns a copy of the settings in the file.

        Raises:
            ConfigurationError: the file is no JSON object, or it is of an adapter for another model.
        """
        return read_settings(self._name, self._settings, self._base)

    @functools.cached_property
    def contents(self) -> LoraFile | ModuleFile | OtherFile:
        """Returns the adapter's layers; or only its tensors, if the store of adapters does not serve the adapter.

        Raises:
            ConfigurationError: the adapter cannot be used.
        """
        try:
            settings = parse_settings(self._name, self._settings, self._base)
            return parse_weights(self._name, self._header, self._file_bytes, settings, self._base)
        except NotServed as exc:
            return parse_any_weights(self._name, self._header, self._file_bytes, exc.with_traceback(None))

    def tensors(self) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
        """Reads the tensors in the order of the file, which has no gaps between them.

        Yields:
            The description of a tensor, and its numbers. The numbers are valid until the next tensor is read.

        Raises:
            ConfigurationError: the file became shorter.
        """
        stored = self.contents.tensors
        memory = torch.empty(max(each.num_bytes for each in stored), dtype=torch.uint8)
        view = memory.numpy().data
        for each in sorted(stored, key=lambda one: one.begin):
            self._fill(view[: each.num_bytes], each.begin)
            self._digest.update(view[: each.num_bytes])
            yield each, memory[: each.num_bytes].view(each.dtype).view(each.shape)

    def digest(self) -> str:
        """Returns the SHA-256 of both files, in hex. Callers must first read all tensors.

        The hash is over one file after the other, `cat adapter_config.json adapter_model.safetensors | sha256sum`. Two
        adapters cannot have the same bytes split at another point, since the second part would not be a valid
        safetensors file.

        Raises:
            ConfigurationError: a file has changed since it was opened.
        """
        if stamp_of(*self._files) != self.stamp:
            raise ConfigurationError(f"the adapter {self._name} is being written: try again when it is complete")
        return self._digest.hexdigest()

    def _fill(self, view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._files[1], [view[done:]], begin + done)
            if count == 0:
                raise ConfigurationError(f"the adapter {self._name} became shorter while it was read")
            done += count


class Reading(OpenAdapter):
    """Reads an adapter that the store of adapters serves.

    Attributes:
        found: the description of the adapter.
    """

    def __init__(self, name: str, config: int, weights: int, base: Base, max_file_bytes: int) -> None:
        """Does what `OpenAdapter` does.

        Raises:
            ConfigurationError: the adapter cannot be used, or the store does not serve its kind.
        """
        super().__init__(name, config, weights, base, max_file_bytes)
        if isinstance(self.contents, OtherFile):
            raise self.contents.why
        self.found = Found(name, self.stamp, is_settled(self.stamp), self.contents)
