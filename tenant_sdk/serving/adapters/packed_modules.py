"""This module reads an adapter that is kept as PEFT's modules into host memory.

Guarantees: the numbers are those of the file, in the file's dtypes. They are not rounded to the dtype of the store,
since a factor near 1, as IA3 has, would lose most of what was trained. Every number is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tenant_sdk.serving.adapters.lora import MODULES
from tenant_sdk.serving.adapters.reading import Reading, Stamp
from tenant_sdk.serving.adapters.weights_file import ModuleFile
from wire.errors import ConfigurationError


@dataclass(frozen=True)
class PackedModules:
    """Holds one adapter's numbers in host memory.

    Attributes:
        digest: the SHA-256 of the adapter's files, in hex.
        name: the adapter's name when it was read, for error messages.
        stamp: sizes and times of its files (see reading.py); None if they cannot be relied on.
        contents: the adapter's settings, layers and shapes.
        values: the tensors by the names that PEFT gives them, all views of one tensor.
        num_bytes: the bytes that the tensors take.
    """

    digest: str
    name: str
    stamp: Stamp | None
    contents: ModuleFile
    values: Mapping[str, torch.Tensor] = field(repr=False)
    num_bytes: int

    @property
    def rank(self) -> int:
        """Returns `MODULES`, which stands for a rank in the slots of adapters that are kept as modules."""
        return MODULES


def pack_modules(reading: Reading, contents: ModuleFile) -> PackedModules:
    """Reads an adapter's weights into one block of memory.

    Args:
        reading: the adapter's open files.
        contents: what they contain, `reading.found.contents`.

    Raises:
        ConfigurationError: a number is NaN or infinite, or the files changed in the meantime.
    """
    found, num_bytes = reading.found, sum(each.num_bytes for each in contents.tensors)
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    by_begin: dict[int, torch.Tensor] = {}
    end = 0
    for stored in sorted(contents.tensors, key=lambda each: -each.dtype.itemsize):  # Then all are aligned.
        begin, end = end, end + stored.num_bytes
        by_begin[stored.begin] = memory[begin:end].view(stored.dtype).view(stored.shape)
    for stored, numbers in reading.tensors():
        if not bool(torch.isfinite(numbers).all()):
            raise ConfigurationError(f"the adapter {found.name} holds NaN or infinite numbers")
        by_begin[stored.begin].copy_(numbers)
    values = {key: by_begin[stored.begin] for key, stored in contents.named.items()}
    return PackedModules(
        reading.digest(), found.name, found.stamp if found.settled else None, contents, values, num_bytes
    )  # fmt: skip
