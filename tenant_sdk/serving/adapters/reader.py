"""This module reads adapters from disk into host memory, for the adapter store.

An adapter must fit the memory of the store's tiers, and must not need calls to the provider that a step without the
adapter does not make. A DoRA adapter's magnitudes are turned into gains, the factors by which DoRA multiplies a layer's
outputs. The gain of output j is the adapter's magnitude divided by the norm of column j of W + s·AᵀBᵀ, where W is the
base weight, shape (inputs, outputs), and s LoRA's scaling. An adapter that is served does not change, so its gains are
computed once, when it is brought into host memory.

Guarantees: an adapter that is too large for a tier, or whose calls would show the provider that it is used, is refused
before its numbers are read. For the gains of layers at the provider, the calls depend on which layers the adapter has
and on its ranks, and on nothing else. Their rows are masked as all others are, with masks that are used once. Nothing
is sent for an adapter with a magnitude that is NaN or infinite. Gains are finite and bounded, whatever the provider
answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.base_products import group_of, group_products
from tenant_sdk.model.dora import column_norms_of_sum
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.serving.adapters.files import Found, LoraFile, ModuleFile, Reading
from tenant_sdk.serving.adapters.folder import Known
from tenant_sdk.serving.adapters.host import HostTier, PackedAdapter, PackedLayer, pack
from tenant_sdk.serving.adapters.loan import Origin
from tenant_sdk.serving.adapters.lora import SlotNumbers
from tenant_sdk.serving.adapters.peft_modules import Layer, PackedModules, ShapeChecks, pack_modules
from wire.errors import ConfigurationError, VeilbaseError

MAX_GAIN = 1e4
"""The largest magnitude of a gain, as of LoRA's scaling (peft_settings.py). A larger one could make rows overflow."""

_Factors = dict[str, tuple[PackedLayer, torch.Tensor, torch.Tensor]]
"""The type of a table of a packed layer, A, shape (rank, inputs), and Bᵀ, shape (rank, outputs), by module."""


def gains_of(
    name: str, packed: PackedAdapter, magnitudes: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> dict[str, torch.Tensor]:
    """Returns the gains of each layer of a DoRA adapter.

    Args:
        name: the adapter's name, for error messages.
        packed: the adapter's factors.
        magnitudes: its magnitudes by module, shape (outputs,).
        layers: the model's layers by name.

    Returns:
        By module: float32, shape (outputs,), on the CPU.

    Raises:
        ConfigurationError: a magnitude is NaN or infinite, or more than `MAX_GAIN` times the norm of its column.
        VeilbaseError: a call to the provider failed, or gave numbers that are not finite.
    """
    for module, magnitude in magnitudes.items():  # before anything is sent
        if not bool(torch.isfinite(magnitude).all()):
            raise _refusal(name, module)
    pieces = packed.values.split([layer.num_weights for layer in packed.layers])
    factors: _Factors = {
        layer.module: (layer, *layer.factors(piece)) for layer, piece in zip(packed.layers, pieces, strict=True)
    }
    norms = _local_norms(factors, layers) | _remote_norms(factors, layers)
    gains = {module: magnitudes[module].to(torch.float32) / norms[module].cpu() for module in factors}
    for module, gain in gains.items():
        if not bool((gain.abs() <= MAX_GAIN).all()):  # NaN is not
            raise _refusal(name, module)
    return gains


def _refusal(name: str, module: str) -> ConfigurationError:
    return ConfigurationError(
        f"the adapter {name} (DoRA) has magnitudes of {module} that are no numbers, or more than {MAX_GAIN:g} times "
        "the norms of the weights"
    )


def _local_norms(factors: _Factors, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    norms = {}
    for module, (layer, lora_a, lora_b) in factors.items():
        like: Any = layers[module].like
        if not isinstance(like, RemoteLinear | RemoteConv1D):
            weight = like.weight.detach().to(torch.float32)
            weight = weight if isinstance(like, Conv1D) else weight.t()  # (inputs, outputs)
            whole = weight.cpu() + layer.scaling * lora_a.to(torch.float32).t() @ lora_b.to(torch.float32)
            norms[module] = torch.linalg.vector_norm(whole, dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    return norms


def _remote_norms(factors: _Factors, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    """Returns the norms of layers at the provider, which is asked for A·W by one call for each group of layers."""
    likes: dict[str, Any] = {
        module: layers[module].like
        for module in factors
        if isinstance(layers[module].like, RemoteLinear | RemoteConv1D)
    }
    if not likes:
        return {}
    norms = {module: like.column_norms().cpu() for module, like in likes.items()}  # before anything is sent
    by_group: dict[RemoteGroup, list[str]] = {}
    for module in sorted(likes, key=lambda module: (group_of(likes[module]).spec.id, int(likes[module].index))):
        by_group.setdefault(group_of(likes[module]), []).append(module)
    device = next(iter(likes.values())).weight.device
    rows = [torch.cat([factors[module][1].to(torch.float32) for module in own]) for own in by_group.values()]
    states = next(iter(by_group)).run_states  # those of the model, and so of all its groups
    with states.own(may_stop=True) as run:
        products = group_products([(group, each.to(device)) for group, each in zip(by_group, rows, strict=True)])
        run.check(part for parts in products for part in parts)
    for own, parts in zip(by_group.values(), products, strict=True):
        begin = 0
        for module in own:
            layer, lora_a, lora_b = factors[module]
            cross = parts[likes[module].index][begin : begin + layer.rank].cpu()
            begin += layer.rank
            norms[module] = column_norms_of_sum(norms[module], cross, lora_a, lora_b.t(), layer.scaling)
    return norms


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
