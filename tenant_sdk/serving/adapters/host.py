"""This module implements the host tier: `HostLoader` brings adapters into host memory, and `HostTier` keeps them there,
each as one block, within a budget of bytes.

An adapter must fit the memory of the store's tiers, and must not need calls to the provider that a step without the
adapter does not make. A DoRA adapter's magnitudes are turned into gains, the factors by which DoRA multiplies a layer's
outputs. The gain of output j is the adapter's magnitude divided by the norm of column j of W + s·AᵀBᵀ, where W is the
base weight, shape (inputs, outputs), and s LoRA's scaling. An adapter that is served does not change, so its gains are
computed once, when it is brought into host memory.

Guarantees:
- adapters never take more bytes than the budget. The adapter that was used longest ago is dropped first. An adapter
  that is dropped while it is being copied to a device stays in memory until the copy is done;
- every number that is kept is finite;
- an adapter that is too large for a tier, or whose calls would show the provider that it is used, is refused before its
  numbers are read;
- for the gains of layers at the provider, the calls depend on which layers the adapter has and on its ranks, and on
  nothing else. Their rows are masked as all others are, with masks that are used once. Nothing is sent for an adapter
  with a magnitude that is NaN or infinite. Gains are finite and bounded, whatever the provider answers.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.base_products import group_of, group_products
from tenant_sdk.model.dora import column_norms_of_sum
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.serving.adapters.lora import AdapterIndices
from tenant_sdk.serving.adapters.peft_modules import Layer, PackedModules, ShapeChecks, pack_modules
from tenant_sdk.serving.adapters.reader import Known, LoraFile, LoraLayer, ModuleFile, OpenAdapter
from tenant_sdk.serving.adapters.targets import Base
from wire.errors import ConfigurationError, VeilbaseError


@dataclass(frozen=True)
class PackedLayer:
    """Describes one layer's factors in a packed adapter.

    Attributes:
        module: the layer's name in the model.
        rank, in_features, out_features: the sizes of the factors: A has shape (rank, in_features), and Bᵀ has shape
            (rank, out_features).
        scaling: the factor by which B must still be multiplied.
    """

    module: str
    rank: int
    in_features: int
    out_features: int
    scaling: float

    @property
    def num_weights(self) -> int:
        """Returns how many numbers the factors A and B have together."""
        return self.rank * (self.in_features + self.out_features)

    def factors(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A, shape (rank, inputs), and Bᵀ, shape (rank, outputs), as views of `values`, the layer's part of a
        packed adapter, shape (num_weights,)."""
        lora_a, lora_b = values.split([self.rank * self.in_features, self.rank * self.out_features])
        return lora_a.view(self.rank, self.in_features), lora_b.view(self.rank, self.out_features)


@dataclass(frozen=True)
class PackedAdapter:
    """Holds one LoRA adapter in host memory.

    Attributes:
        digest: the SHA-256 of the adapter's files, in hex.
        layers: the layers whose factors are in `values`, in order.
        values: A and then Bᵀ of each layer, as one flat tensor, shape (num_weights of all layers,).
        gains: for DoRA, by module, the factors by which the layer's outputs and the outputs of B are still to be
            multiplied, float32, shape (out_features,); empty for LoRA.
    """

    digest: str
    layers: tuple[PackedLayer, ...]
    values: torch.Tensor = field(repr=False)
    gains: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        """Returns the largest rank of the adapter's layers."""
        return max(layer.rank for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the adapter's factors and gains take."""
        gains = sum(each.numel() * each.itemsize for each in self.gains.values())
        return self.values.numel() * self.values.itemsize + gains


Magnitudes = dict[str, torch.Tensor]
"""The type of a table of DoRA's magnitudes, shape (out_features,), by module."""


def pack(
    opened: OpenAdapter, contents: LoraFile, dtype: torch.dtype, pinned: bool = False
) -> tuple[PackedAdapter, Magnitudes]:  # fmt: skip
    """Reads a LoRA adapter's factors into one flat tensor, and returns them with DoRA's magnitudes, if it has any.

    Args:
        opened: the adapter.
        contents: what its files contain, as `OpenAdapter.check` found.
        dtype: the dtype of the tensor, torch.bfloat16 or torch.float32.
        pinned: whether the tensor is in pinned memory, from which a CUDA device copies faster.

    Raises:
        ConfigurationError: a number is NaN or infinite, or too large for `dtype`; or the files changed in the meantime.
    """
    stored = contents.layers
    layers = tuple(_packed_layer(each, dtype) for each in stored)
    values = torch.empty(sum(layer.num_weights for layer in layers), dtype=dtype, pin_memory=pinned)
    magnitudes = {each.module: torch.empty(each.magnitude.shape) for each in stored if each.magnitude is not None}
    places: dict[int, tuple[torch.Tensor, float]] = {
        each.magnitude.begin: (magnitudes[each.module], 1.0) for each in stored if each.magnitude is not None
    }
    for layer, piece, each in zip(layers, values.split([layer.num_weights for layer in layers]), stored, strict=True):
        lora_a, lora_b = layer.factors(piece)
        places[each.lora_a.begin] = (lora_a, 1.0)
        places[each.lora_b.begin] = (lora_b.t(), each.scaling / layer.scaling)
    for tensor, numbers in opened.tensors():
        place, factor = places[tensor.begin]
        place.copy_(numbers)
        if factor != 1.0:
            place.mul_(factor)
    _check_finite(opened.name, values)
    return PackedAdapter(opened.digest(), layers, values), magnitudes


def _packed_layer(stored: LoraLayer, dtype: torch.dtype) -> PackedLayer:
    """Returns the description of a layer in a packed adapter. In float32, or if the scaling is 0 or a power of two,
    the scaling is multiplied into B and `scaling` is 1. Otherwise this would round B in bfloat16, so `scaling` keeps
    it."""
    exact = dtype is torch.float32 or abs(math.frexp(stored.scaling)[0]) in (0.0, 0.5)  # 0 or ± a power of two
    in_features, out_features = stored.lora_a.shape[1], stored.lora_b.shape[0]
    return PackedLayer(stored.module, stored.rank, in_features, out_features, 1.0 if exact else stored.scaling)


def _check_finite(name: str, values: torch.Tensor) -> None:
    """Refuses NaN and infinity, since such a number would reach the rows of other requests in the same step."""
    total = values.sum(dtype=torch.float32)  # A sum of large numbers may be infinite, so each is then checked.
    if not bool(torch.isfinite(total)) and not bool(torch.isfinite(values).all()):
        raise ConfigurationError(f"the adapter {name} holds NaN or infinite numbers, or such as {values.dtype} has not")


class HostTier:
    """Keeps packed adapters by digest, within a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        """Makes a host tier without adapters.

        Args:
            budget_bytes: the most bytes that all adapters may take together.
        """
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, PackedAdapter | PackedModules] = OrderedDict()
        self._used_bytes = 0

    def get(self, digest: str) -> PackedAdapter | PackedModules | None:
        """Returns an adapter and counts it as just used; returns None if the adapter is not in host memory."""
        with self._lock:
            found = self._kept.get(digest)
            if found is not None:
                self._kept.move_to_end(digest)
            return found

    def has(self, digest: str) -> bool:
        """Returns whether an adapter is in host memory; this does not count as a use."""
        with self._lock:
            return digest in self._kept

    def make_room(self, num_bytes: int) -> bool:
        """Drops the adapters that were used longest ago until `num_bytes` are free; returns False, and drops nothing,
        if the whole budget is smaller than `num_bytes`."""
        with self._lock:
            if num_bytes > self.budget_bytes:
                return False
            while self._used_bytes + num_bytes > self.budget_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._used_bytes -= dropped.num_bytes
            return True

    def put(self, packed: PackedAdapter | PackedModules) -> None:
        """Keeps an adapter, and drops others if the budget requires this. An adapter larger than the budget is not
        kept."""
        if not self.make_room(packed.num_bytes):
            return
        with self._lock:
            if packed.digest not in self._kept:
                self._kept[packed.digest] = packed
                self._used_bytes += packed.num_bytes

    def drop(self, digest: str) -> None:
        """Drops an adapter, if it is in host memory."""
        with self._lock:
            dropped = self._kept.pop(digest, None)
            if dropped is not None:
                self._used_bytes -= dropped.num_bytes

    def usage(self) -> tuple[int, int]:
        """Returns the number of adapters in host memory, and the bytes that they take."""
        with self._lock:
            return len(self._kept), self._used_bytes


# ---- DoRA's gains ----------------------------------------------------------------------------------------------------

MAX_GAIN = 1e4
"""The largest magnitude of a gain, as of LoRA's scaling (peft_settings.py). A larger one could make rows overflow."""

_Factors = dict[str, tuple[PackedLayer, torch.Tensor, torch.Tensor]]
"""The type of a table of a packed layer, A, shape (rank, inputs), and Bᵀ, shape (rank, outputs), by module."""


def _gains_of(
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


# ---- from files to host memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Holds the conditions that adapters of a store must meet.

    Attributes:
        max_file_bytes: the largest weights file that is read.
        dtype: the dtype of LoRA adapters in host memory.
        pins_memory: whether LoRA adapters are kept in pinned memory.
        numbers: the adapter indices, which tell which ranks have places.
        fixed_inputs: the layers whose inputs no adapter may change.
    """

    max_file_bytes: int
    dtype: torch.dtype
    pins_memory: bool
    numbers: AdapterIndices
    fixed_inputs: frozenset[str]


class HostLoader:
    """Brings adapters into the host memory of one store."""

    def __init__(
        self, base: Base, layers: Mapping[str, Layer], host: HostTier, known: Known, limits: Limits
    ) -> None:  # fmt: skip
        """Keeps the parts of the store that loading needs.

        Args:
            base: the model that adapters have to fit.
            layers: the model's layers by name.
            host: the host tier, which gets the adapters.
            known: remembers digests and failures.
            limits: the conditions that adapters must meet.
        """
        self._base, self._layers, self._shapes, self._host = base, layers, ShapeChecks(layers), host
        self._known, self._limits = known, limits
        self.num_reads = 0
        """How many adapters were read from disk. Adapters that could not be used do not count."""

    def load(self, opened: OpenAdapter, pinned_digest: str | None = None) -> PackedAdapter | PackedModules:
        """Reads an adapter's numbers, keeps the adapter in host memory and returns it. Only the loading thread may call
        this.

        Args:
            opened: the adapter, checked or not.
            pinned_digest: the digest that the adapter must have; None for any.

        Raises:
            ConfigurationError: the adapter cannot be used. The reason is remembered while the files stay as they are.
            VeilbaseError: a call to the provider failed, which a DoRA adapter needs. This is not remembered.
        """
        try:
            contents = self.check(opened)
            self._host.make_room(contents.packed_bytes(self._limits.dtype))
            packed = self._pack(opened, contents)
            if pinned_digest not in (None, packed.digest):
                raise ConfigurationError(f"the adapter {opened.name} was changed after it was fetched: delete its copy")
        except VeilbaseError as exc:
            self._known.keep_failure(opened.name, opened.settled_stamp, exc)
            raise
        self._known.keep_digest(opened.name, opened.settled_stamp, packed.digest)
        self._host.put(packed)
        self.num_reads += 1
        return packed

    def check(self, opened: OpenAdapter) -> LoraFile | ModuleFile:
        """Checks by its settings and header whether an adapter can be used, and returns what its files contain.

        Raises:
            ConfigurationError: the adapter does not fit the model, is too large for a tier, or needs calls that the
                store does not make.
        """
        contents = opened.check_served(self._base, self._limits.max_file_bytes)
        num_bytes = contents.packed_bytes(self._limits.dtype)
        if num_bytes > self._host.budget_bytes:
            raise ConfigurationError(
                f"the adapter {opened.name} takes {megabytes(num_bytes)}: the host tier has "
                f"{megabytes(self._host.budget_bytes)}"
            )
        if isinstance(contents, ModuleFile):
            self._check_inputs(opened.name, contents)
        elif self._limits.numbers.rank_for(contents.rank) is None:
            most = self._limits.numbers.ranks[-1]
            raise ConfigurationError(
                f"the adapter {opened.name} has the rank {contents.rank}: the device tier takes up to {most}"
            )
        return contents

    def _check_inputs(self, name: str, contents: ModuleFile) -> None:
        """Refuses an adapter that would make more calls than others, unless every step makes these calls."""
        for module in contents.modules:
            if module in self._limits.fixed_inputs and contents.settings.changes_input(module):
                raise ConfigurationError(
                    f"the adapter {name} ({contents.settings.kind.title}) changes the input of {module}, which shares "
                    "its call with other layers: it is served with separate_calls=True"
                )

    def _pack(self, opened: OpenAdapter, contents: LoraFile | ModuleFile) -> PackedAdapter | PackedModules:
        if isinstance(contents, ModuleFile):
            self._shapes.check(opened.name, contents, self._host.budget_bytes)
            return pack_modules(opened, contents)
        packed, magnitudes = pack(opened, contents, self._limits.dtype, self._limits.pins_memory)
        if not magnitudes:
            return packed
        return replace(packed, gains=_gains_of(opened.name, packed, magnitudes, self._layers))


def megabytes(num_bytes: int) -> str:
    """Returns a number of bytes as a text in megabytes."""
    return f"{num_bytes / 1e6:.1f} MB"
