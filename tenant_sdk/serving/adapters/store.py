"""The adapter store: from a name in a request to a slot on the device, through network, disk and host memory.

Guarantees: a ticket's slot holds the adapter whose digest the ticket names until the ticket is released; an adapter
that changed on disk is a new one, with a digest and a slot of its own, while requests that hold the old one keep it;
nothing is read from outside the folder, or fetched from where a request says. Loading happens in a thread of its own,
and fetching in others, so neither makes a step wait; the callback says when something is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tenant_sdk.serving.adapters.catalogue import Catalogue, Entry, fetch, prepare_cache, read_catalogue
from tenant_sdk.serving.adapters.device import DeviceTier
from tenant_sdk.serving.adapters.folder import AdapterFolder
from tenant_sdk.serving.adapters.host import HostTier, PackedAdapter, pack
from tenant_sdk.serving.adapters.known import Known
from tenant_sdk.serving.adapters.lora import AdaptedLayer, CurrentStep, SlotNumbers
from tenant_sdk.serving.adapters.placement import Placement
from tenant_sdk.serving.adapters.reading import Found
from tenant_sdk.serving.adapters.targets import base_of, linear_layers
from tenant_sdk.serving.adapters.ticket import AdapterTicket, Job, Origin
from tenant_sdk.trust.bundle import default_cache
from wire.errors import ConfigurationError, VeilbaseError

RANKS = (8, 16, 32, 64, 128, 256)
"""The ranks of the stacks: an adapter is padded to the next of them. A larger one does not fit the device tier."""
HOST_BYTES = 1 << 30
"""The default budget of the host tier: a hundred adapters of SmolLM2 at rank 16 on all layers."""
MOST_SLOTS = 64
"""The most slots of a rank. A slot without rows costs each layer 3 µs in `grouped_mm`."""
NUM_FETCHERS = 2
"""The adapters that are fetched from the network at a time."""


@dataclass(frozen=True)
class StoreStatus:
    """What is where.

    Attributes:
        device_adapters, device_held: adapters in slots, and those of them that requests hold.
        device_slots: slots of each rank.
        host_adapters, host_bytes, host_budget_bytes: what host memory holds, and may hold.
        disk_adapters: subfolders of the root.
        network_adapters: entries of the catalogue.
        waiting: tickets whose adapter is loaded and that wait for a slot.
    """

    device_adapters: int
    device_held: int
    device_slots: int
    host_adapters: int
    host_bytes: int
    host_budget_bytes: int
    disk_adapters: int
    network_adapters: int
    waiting: int


class AdapterStore:
    """Adapters by name, for the rows of many requests at once."""

    def __init__(
        self, model: torch.nn.Module, root: str | Path | None, catalogue: str | Path | Catalogue | None = None,
        device_slots: int = 16, host_bytes: int = HOST_BYTES, on_ready: Callable[[], None] | None = None, *,
        dtype: torch.dtype = torch.bfloat16, bases: Sequence[str] = (), preload: Sequence[str] = (),
        cache: str | Path | None = None, with_head: bool = False,
    ) -> None:  # fmt: skip
        """Opens a store over a model.

        Args:
            model: a transformers model; its linear layers are watched until `close`.
            root: the folder of PEFT adapters, one subfolder each; None where all come from the catalogue.
            catalogue: the operator's list of adapters elsewhere, or its file.
            device_slots: the adapters of one rank that can be on the device at a time, 1 to 64.
            host_bytes: the memory for adapters on the host.
            on_ready: called from another thread, without arguments, when a ticket is ready or has failed.
            dtype: how adapters are kept on the host: torch.bfloat16, or torch.float32 for exactly the files' numbers.
            bases: further names of this model's weights that adapters may have been trained on.
            preload: names to load now, into host memory and, the first ones, onto the device.
            cache: the folder in which downloads are kept; `adapters` in the client's cache by default.
            with_head: whether adapters may add to the head. Leave it False where a pass makes the logits of some rows
                only, since then nobody knows whose those are.

        Raises:
            ConfigurationError: an option cannot be, two adapters have one name, or one of `preload` cannot be used.
        """
        if not 1 <= device_slots <= MOST_SLOTS:
            raise ConfigurationError(f"device_slots was expected to be 1 to {MOST_SLOTS}, got {device_slots}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ConfigurationError(f"adapters are kept in torch.bfloat16 or torch.float32, not in {dtype}")
        self.on_ready = on_ready
        self._dtype, self._host = dtype, HostTier(host_bytes)
        self._base = base_of(model, tuple(bases), with_head)
        self._open_folders(root, catalogue, Path(cache) if cache is not None else default_cache() / "adapters")
        self._known, self._current = Known(), CurrentStep()
        layers = linear_layers(model)
        self._layers = {name: AdaptedLayer(name, layers[name], self._current) for name in self._base.shapes}
        rows: Any = next(model.parameters())
        numbers = SlotNumbers(RANKS, device_slots)
        self._device = DeviceTier(self._layers, self._base.shapes, numbers, rows.dtype, rows.device)
        self._placement = Placement(self._device)
        self._lock = threading.Lock()
        self._pending: set[AdapterTicket] = set()
        self._fetching: dict[str, list[Job]] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._fetchers = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="adapter-fetcher")
        self._closed = False
        try:
            self._preload(preload)
        except BaseException:
            self.close()
            raise

    def reserve(self, name: str) -> AdapterTicket:
        """Holds an adapter for a request, and starts to load it where it is not on the device.

        Args:
            name: a subfolder of the root, or a name in the catalogue.

        Raises:
            ConfigurationError: there is no such adapter, or its settings or header show that it cannot be used. What
                only its numbers or the network show is the ticket's `failure`.
        """
        origin, ticket = self._origin(name), AdapterTicket(name, self._release)
        digest = self._digest_of(origin)
        if digest is None or not self._placement.take(ticket, digest):
            self._start(Job(ticket, origin, digest))
        return ticket

    def in_step(self, slot_of_row: Sequence[int]) -> AbstractContextManager[None]:
        """Says whose the rows of a forward pass are: inside, this thread's rows get what their adapters add.

        Args:
            slot_of_row: for each row of the pass a ticket's slot, or 0 for no adapter; ascending.

        Raises:
            ConfigurationError: the rows are not in the order of their slots, or nobody holds one of the slots.
        """
        if not self._device.are_held(set(slot_of_row) - {0}):
            raise ConfigurationError("a step names a slot that no ticket holds")
        return self._current.of(self._device.numbers.step(slot_of_row, self._device.device))

    def status(self) -> StoreStatus:
        """Counts what is where."""
        on_disk = len(self._folder.names()) if self._folder is not None else 0
        return StoreStatus(
            *self._device.usage(), self._device.numbers.num_slots, *self._host.usage(), self._host.budget_bytes,
            on_disk, len(self._entries), self._placement.num_waiting,
        )  # fmt: skip

    def describe(self, rank: int = 16, modules: Sequence[str] | None = None) -> str:
        """Returns the line for the start: how many adapters of a rank fit each tier.

        Args:
            rank: the adapters' rank.
            modules: names of the layers that they adapt; None for all linear layers.

        Raises:
            ConfigurationError: the device tier has no such rank, or the model no such layer.
        """
        numbers, shapes = self._device.numbers, self._base.shapes
        names, padded = list(shapes) if modules is None else list(modules), numbers.rank_for(rank)
        if padded is None or rank < 1 or not shapes.keys() >= set(names):
            raise ConfigurationError(f"expected a rank from 1 to {numbers.ranks[-1]} and names of linear layers")
        packed = rank * sum(sum(shapes[name]) for name in names) * self._dtype.itemsize
        slot, status = self._device.slot_bytes(padded, names), self.status()
        return (
            f"adapters of rank {rank} on {len(names)} layers: device {numbers.num_slots} ({_mb(slot)} each), "
            f"host {self._host.budget_bytes // max(1, packed)} ({_mb(packed)} each), "
            f"disk {status.disk_adapters} found, network {status.network_adapters} in the catalogue"
        )

    def close(self) -> None:
        """Stops loading, fails whoever waits, and leaves the model as it was."""
        with self._lock:
            self._closed = True
        for pool in (self._fetchers, self._loader):
            pool.shutdown(wait=True, cancel_futures=True)
        for ticket in tuple(self._pending):
            ticket.failure = ConfigurationError("the adapter store was closed")
            self._settle(ticket)
        for layer in self._layers.values():
            layer.detach()

    def _open_folders(
        self, root: str | Path | None, catalogue: str | Path | Catalogue | None, cache: Path
    ) -> None:  # fmt: skip
        # The files may hold float32 numbers, two bytes more than what is kept, behind a header of up to 8 MiB.
        self._max_file_bytes = 2 * self._host.budget_bytes + (8 << 20)
        self._folder = None if root is None else AdapterFolder(Path(root), self._base, self._max_file_bytes)
        listed = read_catalogue(Path(catalogue)) if isinstance(catalogue, str | Path) else catalogue
        self._entries: dict[str, Entry] = {} if listed is None else dict(listed.adapters)
        self._cache = cache
        if self._entries:
            prepare_cache(cache)
            self._fetched = AdapterFolder(cache, self._base, self._max_file_bytes)
        for name in self._folder.names() if self._folder is not None else []:
            self._refuse_second(name)

    def _refuse_second(self, name: str) -> None:
        if name in self._entries:
            raise ConfigurationError(
                f"the adapter {name} is both in the folder and in the catalogue: rename one of them"
            )

    def _origin(self, name: str) -> Origin:
        if self._closed:
            raise ConfigurationError("the adapter store is closed")
        entry = self._entries.get(name)
        if entry is not None:
            return Origin(name, self._fetched, entry.sha256, entry)
        if self._folder is None:
            raise ConfigurationError(f"the catalogue names no adapter {ascii(name)[:200]}")
        return Origin(name, self._folder, name)

    def _digest_of(self, origin: Origin) -> str | None:
        """Returns an adapter's digest if it is known, and checks its settings and header if it is not."""
        if origin.entry is not None:
            return origin.entry.sha256
        digest = self._known.digest(origin.name, origin.folder.stamp(origin.name, origin.subfolder))
        if digest is None:
            self._check_size(origin.folder.find(origin.name, origin.subfolder))
        return digest

    def _check_size(self, found: Found) -> None:
        num_bytes = found.num_weights * self._dtype.itemsize
        if num_bytes > self._host.budget_bytes:
            raise ConfigurationError(
                f"the adapter {found.name} takes {_mb(num_bytes)}: the host tier has {_mb(self._host.budget_bytes)}"
            )
        if self._device.numbers.rank_for(found.rank) is None:
            raise ConfigurationError(
                f"the adapter {found.name} has the rank {found.rank}: the device tier takes up to {RANKS[-1]}"
            )

    def _start(self, job: Job) -> None:
        entry = job.origin.entry
        with self._lock:
            if self._closed:
                raise ConfigurationError("the adapter store is closed")
            self._pending.add(job.ticket)
            if entry is None or (self._cache / entry.sha256).is_dir():
                self._loader.submit(self._load, job)
                return
            waiting = self._fetching.setdefault(entry.sha256, [])
            waiting.append(job)
            if len(waiting) == 1:
                self._fetchers.submit(self._fetch, job.origin.name, entry)

    def _fetch(self, name: str, entry: Entry) -> None:
        """Fetches an adapter for all who wait for it. Runs in a fetcher."""
        failure: VeilbaseError | None = None
        try:
            fetch(name, entry, self._cache, self._max_file_bytes)
        except VeilbaseError as exc:
            failure = exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must not wait for ever
            failure = ConfigurationError(f"the adapter {name} cannot be fetched ({type(exc).__name__})")
        with self._lock:
            jobs = self._fetching.pop(entry.sha256, [])
            for job in jobs if failure is None and not self._closed else []:
                self._loader.submit(self._load, job)
        if failure is not None:
            for job in jobs:
                self._fail(job, failure)

    def _load(self, job: Job, first: bool = False) -> None:
        """Brings an adapter to the device for a ticket. Runs in the loader, like all that assigns slots.

        Args:
            job: what to load, and for whom.
            first: whether the ticket has waited for a slot already.
        """
        if job.ticket.released:
            return
        try:
            self._placement.place(job, self._packed(job), first)
        except VeilbaseError as exc:
            self._fail(job, exc)
        except Exception as exc:  # noqa: BLE001 - such as a device without memory; a ticket must not wait for ever
            self._fail(
                job, ConfigurationError(f"the adapter {job.origin.name} cannot be loaded ({type(exc).__name__})")
            )
        else:
            if job.ticket.is_ready():
                self._settle(job.ticket)

    def _packed(self, job: Job) -> PackedAdapter:
        """Returns an adapter from host memory, or from disk."""
        found = self._host.get(job.digest) if job.digest is not None else None
        return found if found is not None else self._read(job.origin)

    def _read(self, origin: Origin) -> PackedAdapter:
        stamp = origin.folder.stamp(origin.name, origin.subfolder)
        try:
            with origin.folder.reading(origin.name, origin.subfolder) as reading:
                self._check_size(reading.found)
                self._host.make_room(reading.found.num_weights * self._dtype.itemsize)
                packed = pack(reading, self._dtype, pinned=self._device.device.type == "cuda")
            if origin.entry is not None and packed.digest != origin.entry.sha256:
                raise ConfigurationError(f"the adapter {origin.name} was changed after it was fetched: delete its copy")
        except VeilbaseError as exc:
            self._known.is_bad(origin.name, stamp, exc)
            raise
        self._known.is_good(reading.found, packed.digest)
        self._host.put(packed)
        return packed

    def _release(self, ticket: AdapterTicket) -> None:
        rank = self._placement.release(ticket)
        with self._lock:
            self._pending.discard(ticket)
            if rank is not None and not self._closed:
                self._loader.submit(self._serve_waiting, rank)

    def _serve_waiting(self, rank: int) -> None:
        """Gives slots of a rank to those that wait, in their order. Runs in the loader."""
        while (job := self._placement.next_job(rank)) is not None:
            self._load(job, first=True)

    def _fail(self, job: Job, failure: VeilbaseError) -> None:
        job.ticket.failure = failure
        self._settle(job.ticket)

    def _settle(self, ticket: AdapterTicket) -> None:
        """Lets the engine know that a ticket is ready or has failed."""
        with self._lock:
            self._pending.discard(ticket)
        if self.on_ready is not None:
            self.on_ready()

    def _preload(self, names: Sequence[str]) -> None:
        for name in reversed(names):  # the first ones are used last, and so stay on the device
            origin, ticket = self._origin(name), AdapterTicket(name, self._release)
            if origin.entry is not None:
                fetch(name, origin.entry, self._cache, self._max_file_bytes)
            self._load(Job(ticket, origin, self._digest_of(origin)))  # the loader has nothing to do yet
            ticket.release()
            if ticket.failure is not None:
                raise ticket.failure


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
