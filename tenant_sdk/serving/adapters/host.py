"""This module implements the host tier, which keeps adapters in host memory, each as one block, within a budget of
bytes.

Guarantees: adapters never take more bytes than the budget. The adapter that was used longest ago is dropped first.
Every number that is kept is finite. An adapter that is dropped while it is being copied to a device stays in memory
until the copy is done.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tenant_sdk.serving.adapters.files import LoraFile, LoraLayer, Reading
from tenant_sdk.serving.adapters.peft_modules import PackedModules
from wire.errors import ConfigurationError


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
    reading: Reading, contents: LoraFile, dtype: torch.dtype, pinned: bool = False
) -> tuple[PackedAdapter, Magnitudes]:  # fmt: skip
    """Reads a LoRA adapter's factors into one flat tensor, and returns them with DoRA's magnitudes, if it has any.

    Args:
        reading: the adapter's open files.
        contents: what they contain, `reading.found.contents`.
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
    for tensor, numbers in reading.tensors():
        place, factor = places[tensor.begin]
        place.copy_(numbers)
        if factor != 1.0:
            place.mul_(factor)
    _check_finite(reading.found.name, values)
    return PackedAdapter(reading.digest(), layers, values), magnitudes


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
