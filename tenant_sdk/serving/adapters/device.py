"""This module implements the device tier, which keeps adapters on the device: LoRA factors stacked layer by layer, so
that one matrix product serves many adapters, and other kinds as PEFT's modules.

Each adapter has a place, which an adapter index stands for (lora.py).

Guarantees: a place keeps its adapter while a request holds it. A place gets a new adapter only when no request holds
the place, and all its old contents are overwritten or zeroed before another request gets the place. Only one thread at
a time may call `assign` and `fill`; any thread may call the other methods.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tenant_sdk.serving.adapters.adapted_layer import AdaptedLayer
from tenant_sdk.serving.adapters.host import PackedAdapter, PackedLayer
from tenant_sdk.serving.adapters.lora import MODULES, AdapterIndices, Stack
from tenant_sdk.serving.adapters.module_stack import Batching, ModuleBatch, RowFormat
from tenant_sdk.serving.adapters.peft_modules import Layer, PackedModules, make_modules


@dataclass
class _Resident:
    """Holds the state of a place with an adapter. The place is idle if it has no holders, and
    `ready` once it is filled."""

    digest: str
    holders: int
    ready: bool = False


class DeviceTier:
    """Keeps adapters in places on the device. Each rank has the same number of places, and adapters that are kept as
    modules have as many (rank `MODULES`)."""

    def __init__(
        self, layers: Mapping[str, AdaptedLayer], shapes: Mapping[str, tuple[int, int]], numbers: AdapterIndices,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Makes empty places. A layer's memory for a rank is allocated when an adapter of that rank first adapts it.

        Args:
            layers: the model's linear layers by name.
            shapes: (inputs, outputs) of each layer.
            numbers: the ranks that have places, and the number of places for each rank.
            dtype: the dtype of the arithmetic, which is the dtype of the rows.
            device: the device of the rows.
        """
        self._layers, self._shapes, self.numbers = layers, shapes, numbers
        self.dtype, self.device = dtype, device
        self._batching = Batching()
        self._lock = threading.Lock()
        self._residents: dict[int, _Resident] = {}
        self._index_of: dict[str, int] = {}
        self._idle: dict[int, OrderedDict[int, None]] = {rank: OrderedDict() for rank in numbers.ranks}
        self._free = {rank: list(range(numbers.num_places))[::-1] for rank in numbers.ranks}
        self.num_loads = 0
        """How often an adapter was copied into a place."""

    def acquire(self, digest: str) -> int | None:
        """Holds the place of an adapter and returns its adapter index; returns None if no place has this adapter
        ready."""
        with self._lock:
            index = self._index_of.get(digest)
            if index is None or not self._residents[index].ready:
                return None
            self._residents[index].holders += 1
            self._idle[self.numbers.place(index)[0]].pop(index, None)
            return index

    def has_room(self, rank: int, digest: str | None) -> bool:
        """Returns True if `assign` would return a place of this rank now, or if the adapter already has a place."""
        with self._lock:
            return bool(self._free[rank] or self._idle[rank]) or digest in self._index_of

    def assign(self, digest: str, rank: int) -> int | None:
        """Reserves a place for an adapter that is not on the device. Callers must then copy the adapter into the place
        by `fill`.

        If no place is free, the place that has been idle longest loses its adapter and is used.

        Args:
            digest: the digest of the adapter, which must not have a place yet.
            rank: the rank of the place, one of `numbers.ranks`.

        Returns:
            The adapter index of the place; None if requests hold all places of this rank.
        """
        with self._lock:
            if self._free[rank]:
                index = self.numbers.index(rank, self._free[rank].pop())
            elif self._idle[rank]:
                index, _ = self._idle[rank].popitem(last=False)
                del self._index_of[self._residents[index].digest]
            else:
                return None
            self._residents[index] = _Resident(digest, holders=1)
            self._index_of[digest] = index
            return index

    def fill(self, index: int, packed: PackedAdapter | PackedModules) -> None:
        """Copies an adapter into the place that `assign` returned for it. From then on, `acquire` finds the adapter. If
        this fails, the place is free again.

        Raises:
            ConfigurationError: the adapter's modules cannot be used.
            InvalidTensor: one of the adapter's modules does not call its base layer once.
            RuntimeError: the device has too little memory.
        """
        rank, place = self.numbers.place(index)
        try:
            self._copy(rank, place, packed)
        except BaseException:
            try:
                for layer in self._layers.values():
                    _clear(layer, rank, place)
            finally:
                self._abandon(index)
            raise
        with self._lock:
            self._residents[index].ready = True
            self.num_loads += 1

    def release(self, index: int) -> None:
        """Ends one hold on a place. The adapter stays in the place until another adapter needs the place."""
        with self._lock:
            held = self._residents[index]
            held.holders -= 1
            if held.holders == 0:
                self._idle[self.numbers.place(index)[0]][index] = None

    def drop(self, digest: str) -> bool:
        """Empties the place of an adapter that no request holds. Only the loading thread may call this.

        Returns:
            False if requests hold the adapter, which stays in its place.
        """
        with self._lock:
            index = self._index_of.get(digest)
            if index is None:
                return True
            rank, place = self.numbers.place(index)
            if index not in self._idle[rank]:
                return False
            del self._idle[rank][index], self._index_of[digest]  # `acquire` and `assign` find it no more
            del self._residents[index]
        for layer in self._layers.values():
            _clear(layer, rank, place)
        with self._lock:
            self._free[rank].append(place)
        return True

    def are_held(self, indices: Iterable[int]) -> bool:
        """Returns True if each of these places contains an adapter and is held by a request."""
        with self._lock:
            found = [self._residents.get(index) for index in indices]
            return all(each is not None and each.ready and each.holders > 0 for each in found)

    def has(self, digest: str) -> bool:
        """Returns whether a place has this adapter ready."""
        with self._lock:
            index = self._index_of.get(digest)
            return index is not None and self._residents[index].ready

    def usage(self) -> tuple[int, int, int]:
        """Returns the number of adapters in places, the number of these adapters that requests hold, and the number of
        places of all ranks that `assign` may give away now."""
        with self._lock:
            held = sum(each.holders > 0 for each in self._residents.values())
            reusable = sum(len(self._free[rank]) + len(self._idle[rank]) for rank in self.numbers.ranks)
            return len(self._residents), held, reusable

    def place_bytes(self, rank: int, modules: Iterable[str]) -> int:
        """Returns the bytes that one place of a rank takes in the layers that `modules` names."""
        return sum(rank * sum(self._shapes[name]) for name in modules) * self.dtype.itemsize

    def _abandon(self, index: int) -> None:
        rank, place = self.numbers.place(index)
        with self._lock:
            del self._index_of[self._residents.pop(index).digest]
            self._free[rank].append(place)

    def _copy(self, rank: int, place: int, packed: PackedAdapter | PackedModules) -> None:
        if isinstance(packed, PackedModules):
            adapted = self._put_modules(place, packed)
        else:
            adapted = self._copy_factors(rank, place, packed)
        for name, other in self._layers.items():
            if name not in adapted:
                _clear(other, rank, place)  # The place's previous adapter may have adapted this layer.

    def _copy_factors(self, rank: int, place: int, packed: PackedAdapter) -> set[str]:
        """Copies a LoRA adapter's factors into the stacks, and returns the layers that the adapter adds to."""
        values = packed.values if self.device.type == "cpu" else packed.values.to(self.device)
        own = dict(zip(packed.layers, values.split([layer.num_weights for layer in packed.layers]), strict=True))
        for layer, factors in own.items():
            _fill(self._stack(self._layers[layer.module], rank), place, layer, factors, packed.gains.get(layer.module))
        return {layer.module for layer in own}

    def _put_modules(self, place: int, packed: PackedModules) -> set[str]:
        """Makes an adapter's modules, and returns the layers that the adapter changes."""
        contents = packed.contents
        layers = {name: Layer(self._layers[name].like, self._shapes[name]) for name in contents.modules}
        settings = None  # Such adapters are computed one after the other.
        if not contents.settings.kind.makes_matrices:
            settings = repr((contents.settings.peft_type, sorted(contents.settings.options.items()), contents.modules))
        for name, module in make_modules(packed, layers, self.dtype, self.device).items():
            rows = RowFormat(*self._shapes[name], self.dtype, self.device)
            new_batch = partial(ModuleBatch, rows, self._batching)
            self._layers[name].modules.put(place, module, contents.settings.changes_input(name), settings, new_batch)
        return set(contents.modules)

    def _stack(self, layer: AdaptedLayer, rank: int) -> Stack:
        """Returns a layer's stack (the factors in all places) for a rank; makes the stack if the layer has none yet."""
        found = layer.stacks.get(rank)
        if found is None:
            bias = getattr(layer.like, "bias", None)
            found = Stack(self.numbers.num_places, rank, self._shapes[layer.name], self.dtype, self.device, bias)
            with self._lock:
                taken = [self.numbers.place(index) for index in self._residents]
            for place in (place for its_rank, place in taken if its_rank == rank):
                found.places[place].zero_()  # The adapters that are already in places do not adapt this layer.
            layer.stacks[rank] = found
        return found


def _clear(layer: AdaptedLayer, rank: int, place: int) -> None:
    """Makes the adapter in a place change nothing in a layer."""
    stack = layer.modules if rank == MODULES else layer.stacks.get(rank)
    if stack is not None:
        stack.clear(place)


def _fill(
    stack: Stack, place: int, layer: PackedLayer, values: torch.Tensor, gain: torch.Tensor | None
) -> None:  # fmt: skip
    """Writes a layer's factors A and B, padded with zeros to the stack's rank, and its gains, if the adapter is DoRA,
    into a place of the stack."""
    target_a, target_b = stack.lora_a[place], stack.lora_b[place]
    if layer.rank == target_a.shape[0]:
        stack.places[place].copy_(values)  # The stack has the same layout as the packed factors.
    else:
        lora_a, lora_b = layer.factors(values)
        target_a[: layer.rank].copy_(lora_a)
        target_b[: layer.rank].copy_(lora_b)
        target_a[layer.rank :].zero_()
        target_b[layer.rank :].zero_()
    if layer.scaling != 1.0:
        target_b[: layer.rank].mul_(layer.scaling)
    if gain is not None:
        target_b[: layer.rank].mul_(gain.to(target_b))
    stack.set_gain(place, gain)
    stack.adapted.add(place)
