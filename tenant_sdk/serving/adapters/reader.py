"""This module reads adapters from disk into host memory. An adapter must fit the memory of the store's tiers, and must
not need calls to the provider that a step without the adapter does not make.

Guarantees: an adapter that is too large for a tier, or whose calls would show the provider that it is used, is refused
before its numbers are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tenant_sdk.serving.adapters.dora_gains import gains_of
from tenant_sdk.serving.adapters.host import HostTier, PackedAdapter, pack
from tenant_sdk.serving.adapters.known import Known
from tenant_sdk.serving.adapters.lora import SlotNumbers
from tenant_sdk.serving.adapters.packed_modules import PackedModules, pack_modules
from tenant_sdk.serving.adapters.peft_modules import Layer, ShapeChecks
from tenant_sdk.serving.adapters.reading import Found, Reading
from tenant_sdk.serving.adapters.ticket import Origin
from tenant_sdk.serving.adapters.weights_file import LoraFile, ModuleFile
from wire.errors import ConfigurationError, VeilbaseError


@dataclass(frozen=True)
class Limits:
    """Holds the conditions that adapters of a store must meet.

    Attributes:
        dtype: the dtype of LoRA adapters in host memory.
        numbers: the numbering of the slots, which tells which ranks have slots.
        fixed_inputs: the layers whose inputs no adapter may change.
    """

    dtype: torch.dtype
    numbers: SlotNumbers
    fixed_inputs: frozenset[str]


class AdapterReader:
    """Reads adapters for one store."""

    def __init__(
        self, layers: Mapping[str, Layer], host: HostTier, known: Known, limits: Limits, pinned: bool
    ) -> None:  # fmt: skip
        """Keeps the parts of the store that reading needs.

        Args:
            layers: the model's layers by name.
            host: the host tier, which gets the adapters.
            known: remembers digests and failures.
            limits: the conditions that adapters must meet.
            pinned: whether LoRA adapters are kept in pinned memory.
        """
        self._layers, self._shapes, self._host, self._known = layers, ShapeChecks(layers), host, known
        self._limits, self._pinned = limits, pinned
        self.num_reads = 0
        """How many adapters were read from disk. Adapters that could not be used do not count."""

    def read(self, origin: Origin) -> PackedAdapter | PackedModules:
        """Reads an adapter from disk, keeps it in host memory and returns it. Only the loading thread may call this.

        Raises:
            ConfigurationError: the adapter cannot be used. The reason is remembered while the files stay as they are.
            VeilbaseError: a call to the provider failed, which a DoRA adapter needs. This is not remembered.
        """
        stamp = origin.folder.stamp(origin.name, origin.subfolder)
        try:
            with origin.folder.reading(origin.name, origin.subfolder) as reading:
                self.check(reading.found)
                self._host.make_room(reading.found.contents.packed_bytes(self._limits.dtype))
                packed = self._pack(reading)
            if origin.entry is not None and packed.digest != origin.entry.sha256:
                raise ConfigurationError(f"the adapter {origin.name} was changed after it was fetched: delete its copy")
        except VeilbaseError as exc:
            self._known.keep_failure(origin.name, stamp, exc)
            raise
        self._known.keep_digest(reading.found, packed.digest)
        self._host.put(packed)
        self.num_reads += 1
        return packed

    def check(self, found: Found) -> None:
        """Checks by its settings and header whether an adapter can be used.

        Raises:
            ConfigurationError: the adapter is too large for a tier, or needs calls that the store does not make.
        """
        num_bytes = found.contents.packed_bytes(self._limits.dtype)
        if num_bytes > self._host.budget_bytes:
            raise ConfigurationError(
                f"the adapter {found.name} takes {megabytes(num_bytes)}: the host tier has "
                f"{megabytes(self._host.budget_bytes)}"
            )
        if isinstance(found.contents, ModuleFile):
            self._check_inputs(found.name, found.contents)
        elif self._limits.numbers.rank_for(found.contents.rank) is None:
            most = self._limits.numbers.ranks[-1]
            raise ConfigurationError(
                f"the adapter {found.name} has the rank {found.contents.rank}: the device tier takes up to {most}"
            )

    def _check_inputs(self, name: str, contents: ModuleFile) -> None:
        """Refuses an adapter that would make more calls than others, unless every step makes these calls."""
        for module in contents.modules:
            if module in self._limits.fixed_inputs and contents.settings.changes_input(module):
                raise ConfigurationError(
                    f"the adapter {name} ({contents.settings.kind.title}) changes the input of {module}, which shares "
                    "its call with other layers: it is served with separate_calls=True"
                )

    def _pack(self, reading: Reading) -> PackedAdapter | PackedModules:
        found = reading.found
        if isinstance(found.contents, LoraFile):
            packed, magnitudes = pack(reading, found.contents, self._limits.dtype, self._pinned)
            if not magnitudes:
                return packed
            return replace(packed, gains=gains_of(found.name, packed, magnitudes, self._layers))
        self._shapes.check(found.name, found.contents, self._host.budget_bytes)
        return pack_modules(reading, found.contents)


def megabytes(num_bytes: int) -> str:
    """Returns a number of bytes as a text in megabytes."""
    return f"{num_bytes / 1e6:.1f} MB"
