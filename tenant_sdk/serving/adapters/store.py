"""This module holds the adapter store, which brings the adapter of a request's name from the network, disk or host
memory into a place on the device.

A request holds its adapter by a loan. `Placement` gives places to loans; a loan waits if no place of its adapter's
rank is free. Only the loading thread may call its methods `place` and `next_waiting`; any thread may call the others.
`StoreStatus` holds the numbers by which a store describes itself, for operators and metrics.

Guarantees:
- a loan has one place from the time that it is ready until it is released, and until then the place holds the adapter
  of the loan's digest. A callback is called when a loan is ready or has failed;
- an adapter that changed on disk counts as a new adapter, with its own digest and place; requests that hold the old
  adapter keep it;
- loans that wait for a place of one rank get places in the order in which they began to wait. Loans whose adapter
  already has a place overtake a waiting loan at most `MOST_PASSED` times;
- a name that is both in the folder and in the catalogue when the store is opened is refused, and the log says so; if
  the folder gets it later, it stands for the catalogue's adapter, whose digest is pinned;
- files are read only from the operator's folder and the folder of downloads, and never fetched from an address in a
  request;
- one thread loads adapters and others fetch them, so that no step waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from tenant_sdk.options import from_keywords, takes_options
from tenant_sdk.serving.adapters.adapted_layer import AdaptedLayer, CurrentStep, HeadRows
from tenant_sdk.serving.adapters.catalogue import Catalogue, Entry, fetch, prepare_cache, read_catalogue
from tenant_sdk.serving.adapters.device import DeviceTier
from tenant_sdk.serving.adapters.host import HostLoader, HostTier, Limits, PackedAdapter, megabytes
from tenant_sdk.serving.adapters.loan import AdapterLoan
from tenant_sdk.serving.adapters.lora import MODULES, AdapterIndices
from tenant_sdk.serving.adapters.peft_modules import Layer, PackedModules
from tenant_sdk.serving.adapters.reader import AdapterFolder, Known, OpenAdapter
from tenant_sdk.serving.adapters.targets import base_of, head_of, linear_layers
from tenant_sdk.serving.settings import StoreKeywords, StoreOptions
from tenant_sdk.trust.bundle import default_cache
from wire.errors import ConfigurationError, VeilbaseError


@dataclass(frozen=True)
class StoreStatus:
    """Holds the numbers of adapters on each tier of a store, and how often adapters were moved between tiers.

    Attributes:
        device_adapters, device_held: the number of adapters in places, and of those that requests hold.
        device_slots: the number of places of each rank.
        device_reusable: the number of places of all ranks that the next adapter may get, since they are empty or no
            request holds their adapter. Together with `device_held` they are all places.
        device_loads: how often an adapter was copied into a place.
        host_adapters, host_bytes, host_budget_bytes: the number of adapters in host memory, the bytes that they take,
            and the most bytes that they may take.
        disk_adapters: the number of the folder's subfolders.
        disk_reads: how often an adapter was read from disk into host memory.
        network_adapters: the number of the catalogue's entries.
        waiting: the number of loans whose adapter is loaded and that wait for a place.
    """

    device_adapters: int
    device_held: int
    device_slots: int
    device_reusable: int
    device_loads: int
    host_adapters: int
    host_bytes: int
    host_budget_bytes: int
    disk_adapters: int
    disk_reads: int
    network_adapters: int
    waiting: int


@dataclass(frozen=True)
class Origin:
    """Describes where an adapter's files are.

    Attributes:
        name: the name by which requests ask for the adapter.
        folder, subfolder: the folder of adapters, and in it the subfolder with the files, which are downloaded there if
            necessary.
        entry: the adapter's entry in the catalogue; None for an adapter of the operator's folder.
    """

    name: str
    folder: AdapterFolder
    subfolder: str
    entry: Entry | None = None

    def open(self) -> OpenAdapter:
        """Opens the adapter's files; see `AdapterFolder.open`."""
        return self.folder.open(self.name, self.subfolder)


@dataclass(frozen=True)
class LoadRequest:
    """Asks the loader to load the adapter of a loan.

    Attributes:
        loan: the loan.
        origin: where the adapter's files are.
        digest: the digest that the adapter's files should have; None if it is not known.
        opened: the adapter's files, which were opened for the loan; None if the loader has to open them.
    """

    loan: AdapterLoan
    origin: Origin
    digest: str | None
    opened: OpenAdapter | None = None


MOST_OPEN = 32
"""The most adapters whose files stay open from the request until they are loaded. The files of further ones are closed,
and opened and checked again when it is their turn, since a process may have few files open, often 1,024."""
MOST_PASSED = 64
"""A request that waits for a place is overtaken by at most this number of requests of the same rank whose adapter
already has a place. Later requests wait behind the waiting request, so that a place becomes free."""


class Placement:
    """Assigns the places of a device tier, and keeps the queues of loans that wait for a place."""

    def __init__(self, device: DeviceTier) -> None:
        """Makes a placement in which no loan waits.

        Args:
            device: the device tier whose places are given out.
        """
        self._device = device
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[LoadRequest]] = {rank: deque() for rank in device.numbers.ranks}

    @property
    def num_waiting(self) -> int:
        """Returns the number of loans whose adapter is loaded and that have no place yet."""
        with self._lock:
            return sum(not each.loan.released for waiting in self._waiting.values() for each in waiting)

    def take(self, loan: AdapterLoan, digest: str) -> bool:
        """Gives a loan the place of its adapter, if the adapter is on the device and the loan may overtake those
        that wait for a place of the same rank.

        Returns:
            Whether the loan has the place now. If not, callers must load the adapter and call `place`.
        """
        with self._lock:
            index = self._device.acquire(digest)
            if index is None:
                return False
            if not self._may_pass(self._device.numbers.place(index)[0]):
                self._device.release(index)
                return False
            self._hand_over(loan, index, digest)
            return True

    def place(self, load_request: LoadRequest, packed: PackedAdapter | PackedModules, first: bool = False) -> None:
        """Gives a loan a place that holds its adapter, or makes the loan wait for a place.

        Args:
            load_request: the load request whose adapter was loaded.
            packed: the adapter.
            first: whether the loan has already waited and is the next one of its rank.

        Raises:
            ConfigurationError: no rank of the device tier is large enough, or the adapter's modules cannot be used.
            InvalidTensor: one of the adapter's modules does not call its base layer once.
            RuntimeError: the device has too little memory.
        """
        rank = self._device.numbers.rank_for(packed.rank)
        if rank is None:
            raise ConfigurationError(
                f"the adapter {load_request.origin.name} has the rank {packed.rank}: the device tier takes ranks up to "
                f"{self._device.numbers.ranks[-1]}"
            )
        with self._lock:
            index = self._index_for(load_request, packed.digest, rank, first)
            if index is None:
                return
        self._device.fill(index, packed)
        with self._lock:
            self._hand_over(load_request.loan, index, packed.digest)

    def release(self, loan: AdapterLoan) -> int | None:
        """Ends a loan's hold on its place. Returns the place's rank if other loans wait for a place of this rank."""
        with self._lock:
            if loan.released:
                return None
            loan.released = True
            if loan.placed is None:
                return None
            self._device.release(loan.placed[0])
            rank, _ = self._device.numbers.place(loan.placed[0])
            return rank if self._waiting[rank] else None

    def next_waiting(self, rank: int) -> LoadRequest | None:
        """Returns the first load request that waits for a place of a rank, and removes it from the rank's queue.

        Returns:
            None if none waits, or if the first one cannot get a place now.
        """
        with self._lock:
            waiting = self._waiting[rank]
            while waiting and waiting[0].loan.released:
                waiting.popleft()
            if not waiting or not self._device.has_room(rank, waiting[0].digest):
                return None
            return waiting.popleft()

    def _index_for(self, load_request: LoadRequest, digest: str, rank: int, first: bool) -> int | None:
        """Assigns a place that callers must fill, and returns its adapter index. Returns None if the loan got a filled
        place or has to wait. Callers must hold the lock."""
        waiting, loan = self._waiting[rank], load_request.loan
        if first or self._may_pass(rank):
            index = self._device.acquire(digest)
            if index is not None:
                self._hand_over(loan, index, digest)
                return None
        if first or not waiting:
            index = self._device.assign(digest, rank)
            if index is not None:
                return index
        again = LoadRequest(loan, load_request.origin, digest)
        if first:
            waiting.appendleft(again)
        else:
            waiting.append(again)
        return None

    def _may_pass(self, rank: int) -> bool:
        """Returns whether a loan whose adapter has a place may overtake the first waiting loan, and counts the
        attempt."""
        waiting = self._waiting[rank]
        if not waiting:
            return True
        waiting[0].loan.passed += 1
        return waiting[0].loan.passed <= MOST_PASSED

    def _hand_over(self, loan: AdapterLoan, index: int, digest: str) -> None:
        """Makes a place that is held for a loan the loan's place, or releases the place if the loan has been
        released. Callers must hold the lock."""
        if loan.released:
            self._device.release(index)
        else:
            loan.placed = (index, digest)


RANKS = (8, 16, 32, 64, 128, 256)
"""The ranks of the stacks. An adapter is padded to the smallest of these ranks that is large enough, and is refused if
its rank is larger than all of them."""
Tier = Literal["device", "host", "disk", "network"]
"""Where an adapter is; the first tier is the fastest."""
NUM_FETCHERS = 2
"""The number of adapters that are fetched from the network at the same time."""
_log = logging.getLogger(__name__)


def _of_two(name: str) -> str:
    return (
        f"the adapter {name} was both in the folder and in the catalogue at the start: rename one of them and start "
        "again"
    )


class AdapterStore:
    """Gives adapters by name to many requests, and applies to each row of a step the row's own adapter."""

    @takes_options(StoreOptions)
    def __init__(
        self,
        model: torch.nn.Module,
        root: str | Path | None,
        *,
        on_ready: Callable[[], None] | None = None,
        **options: Unpack[StoreKeywords],
    ) -> None:
        """Opens a store over a model.

        Args:
            model: a transformers model; its linear layers have hooks until `close`.
            root: the folder of PEFT adapters, one subfolder each; None if all adapters come from the catalogue.
            on_ready: called without arguments, from any thread, when a loan that was not ready at once is ready or
                has failed.
            **options: those of `StoreOptions`.

        Raises:
            ConfigurationError: an option is invalid, two adapters of the folder have the same name but for case, or one
                of `preload` cannot be used.
            VeilbaseError: a call to the provider failed, which a DoRA adapter among `preload` needs.
        """
        own = from_keywords(StoreOptions, options, "AdapterStore")
        own.check()
        dtype: torch.dtype = getattr(torch, str(own.dtype_name))
        self.on_ready = on_ready
        self._dtype, self._host = dtype, HostTier(own.host_bytes)
        self._base = base_of(model, tuple(own.bases))
        cache = default_cache() / "adapters" if own.cache is None else Path(own.cache)
        self._find_folders(root, own.catalogue, cache)
        self._known, self._current = Known(), CurrentStep()
        numbers = AdapterIndices((MODULES, *RANKS), own.device_slots)
        self._watch(model, numbers, own.separate_calls)
        rows: Any = next(model.parameters())
        self._device = DeviceTier(self._layers, self._base.shapes, numbers, rows.dtype, rows.device)
        self._placement = Placement(self._device)
        fixed_inputs = frozenset[str]() if own.separate_calls else self._base.in_groups
        limits = Limits(self._max_file_bytes, dtype, self._device.device.type == "cuda", numbers, fixed_inputs)
        likes = {name: Layer(layer.like, self._base.shapes[name]) for name, layer in self._layers.items()}
        self._host_loader = HostLoader(self._base, likes, self._host, self._known, limits)
        self._lock = threading.Lock()
        self._pending: set[AdapterLoan] = set()
        self._opened: set[OpenAdapter] = set()
        self._fetching: dict[str, list[LoadRequest]] = {}
        self._dropped: set[str] = set()
        self.loader = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._fetchers = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="adapter-fetcher")
        self._closed = False
        try:
            self._preload(own.preload)
        except BaseException:
            self.close()
            raise

    def reserve(self, name: str) -> AdapterLoan:
        """Holds an adapter for a request, and starts to load the adapter if it is not on the device.

        Args:
            name: a subfolder of the root, or a name in the catalogue.

        Returns:
            The request's loan. If the adapter turns out later to be unusable, by its numbers or because it cannot be
            fetched, the reason is the loan's `failure`.

        Raises:
            ConfigurationError: there is no such adapter, or its settings or header show that it cannot be used.
        """
        origin, loan = self._origin(name), AdapterLoan(name, self._release)
        opened = None if origin.entry is not None else origin.open()
        try:
            digest = self._digest_of(origin, opened)
            with self._lock:
                self._dropped.discard(digest or "")
            if digest is None or not self._placement.take(loan, digest):
                opened = self._start(LoadRequest(loan, origin, digest, opened))
        finally:
            if opened is not None:
                opened.close()
        return loan

    def in_step(self, index_of_row: Sequence[int]) -> AbstractContextManager[None]:
        """Returns a context in which forward passes of this thread apply to each row the row's own adapter.

        Args:
            index_of_row: for each row of the pass, the adapter index of a loan, or 0 for no adapter; ascending.

        Raises:
            ConfigurationError: the rows are not in the order of these, or a place is not held.
        """
        if not self._device.are_held(set(index_of_row) - {0}):
            raise ConfigurationError("a step names an adapter index that no loan holds")
        return self._current.of(self._device.numbers.step(index_of_row, self._device.device))

    def names(self, most: int | None = None) -> list[str]:
        """Returns the names that `reserve` takes: the folder's subfolders now, and the catalogue's entries.

        Args:
            most: if there are more, only so many of them are looked for; None finds all.
        """
        listed = list(itertools.islice(self._entries, most))
        found = {*(self._folder.names(most) if self._folder is not None else []), *listed}
        return sorted(found - self._refused)[:most]

    def has(self, name: str) -> bool:
        """Returns whether `names` has a name now. This looks for one subfolder only, however many there are."""
        is_there = name in self._entries or (self._folder is not None and self._folder.has(name))
        return is_there and name not in self._refused

    def drop(self, name: str) -> None:
        """Frees the memory that an adapter takes in host memory and on the device, now or when the last request that
        holds it has ended. The next request for the adapter reads it from disk."""
        entry = self._entries.get(name)
        digest = self._known.last_digest(name) if entry is None else entry.sha256
        with self._lock:
            if digest is not None and not self._closed:
                self._dropped.add(digest)
                self.loader.submit(self._drop, digest)

    def _drop(self, digest: str) -> None:
        """Does the work of `drop`. Only the loading thread runs this."""
        with self._lock:
            if digest not in self._dropped:  # A request has asked for the adapter in the meantime.
                return
        self._host.drop(digest)
        if self._device.drop(digest):
            with self._lock:
                self._dropped.discard(digest)

    def tiers(self) -> dict[str, Tier]:
        """Returns for each name of `names` the fastest tier that has the adapter, as it was when it was last used."""
        return {name: self._tier(name) for name in self.names()}

    def _tier(self, name: str) -> Tier:
        entry = self._entries.get(name)
        digest = self._known.last_digest(name) if entry is None else entry.sha256
        if digest is not None and self._device.has(digest):
            return "device"
        if digest is not None and self._host.has(digest):
            return "host"
        is_fetched = entry is None or (self._cache / entry.sha256).is_dir()
        return "disk" if is_fetched else "network"

    def status(self) -> StoreStatus:
        """Returns the number of adapters on each tier (network, disk, host memory and device), and the numbers of loads
        since the store was opened."""
        device_adapters, device_held, device_reusable = self._device.usage()
        host_adapters, host_bytes = self._host.usage()
        return StoreStatus(
            device_adapters=device_adapters,
            device_held=device_held,
            device_slots=self._device.numbers.num_places,
            device_reusable=device_reusable,
            device_loads=self._device.num_loads,
            host_adapters=host_adapters,
            host_bytes=host_bytes,
            host_budget_bytes=self._host.budget_bytes,
            disk_adapters=len(self._folder.names()) if self._folder is not None else 0,
            disk_reads=self._host_loader.num_reads,
            network_adapters=len(self._entries),
            waiting=self._placement.num_waiting,
        )

    def describe(self, rank: int | None = None, modules: Sequence[str] | None = None) -> str:
        """Returns a line that states how many LoRA adapters of a rank fit on each tier, and how many adapters of other
        kinds the device takes; `Engine.explain` prints it, and so does `tenant serve` when it starts.

        Args:
            rank: the rank of the adapters; None stands for 16, or the largest rank if that is less.
            modules: the names of the layers that the adapters change; None means all linear layers.

        Raises:
            ConfigurationError: the rank is too large for the device tier, or the model has no such layer.
        """
        numbers, shapes = self._device.numbers, self._base.shapes
        rank = min(16, numbers.ranks[-1]) if rank is None else rank
        names, padded = list(shapes) if modules is None else list(modules), numbers.rank_for(rank)
        if padded is None or rank < 1 or not shapes.keys() >= set(names):
            raise ConfigurationError(f"expected a rank from 1 to {numbers.ranks[-1]} and names of linear layers")
        packed = rank * sum(sum(shapes[name]) for name in names) * self._dtype.itemsize
        place_bytes, status = self._device.place_bytes(padded, names), self.status()
        return (
            f"of rank {rank} on {len(names)} layers: device {numbers.num_places} ({megabytes(place_bytes)} each), "
            f"host {self._host.budget_bytes // max(1, packed)} ({megabytes(packed)} each), "
            f"disk {status.disk_adapters} found, network {status.network_adapters} in the catalogue; "
            f"of other kinds: device {numbers.num_places}"
        )

    def close(self) -> None:
        """Stops loading, fails all loans that are not ready, and removes the hooks from the model."""
        with self._lock:
            self._closed = True
        for pool in (self._fetchers, self.loader):
            pool.shutdown(wait=True, cancel_futures=True)
        for opened in self._opened:
            opened.close()
        for loan in tuple(self._pending):
            loan.failure = ConfigurationError("the adapter store was closed")
            self._settle(loan)
        for hook in self._hooks:
            hook.detach()

    def _watch(self, model: torch.nn.Module, numbers: AdapterIndices, separate_calls: bool) -> None:
        """Registers the hooks by which adapters change the model's layers."""
        layers, head = linear_layers(model), head_of(model)
        self._layers = {
            name: AdaptedLayer(
                name, layers[name], self._current, name == head, separate_calls and name in self._base.in_groups
            )
            for name in self._base.shapes
        }
        self._hooks: list[AdaptedLayer | HeadRows] = [*self._layers.values()]
        if head in self._layers:
            self._hooks.append(
                HeadRows(
                    model, self._layers[head], self._current, lambda indices: numbers.step(indices, self._device.device)
                )
            )

    def _find_folders(
        self, root: str | Path | None, catalogue: str | Path | Catalogue | None, cache: Path
    ) -> None:  # fmt: skip
        # A file may hold float32 numbers, twice the size of bfloat16, after a header of up to 8 MiB.
        self._max_file_bytes = 2 * self._host.budget_bytes + (8 << 20)
        self._folder = None if root is None else AdapterFolder(Path(root))
        listed = read_catalogue(Path(catalogue)) if isinstance(catalogue, str | Path) else catalogue
        self._entries: dict[str, Entry] = {} if listed is None else dict(listed.adapters)
        self._cache = cache
        if self._entries:
            prepare_cache(cache)
            self._fetched = AdapterFolder(cache)
        twice = [name for name in (self._folder.names() if self._folder is not None else []) if name in self._entries]
        for name in twice:
            _log.error("an adapter is not served: %s", _of_two(name))
        self._refused = frozenset(twice)

    def _origin(self, name: str) -> Origin:
        if self._closed:
            raise ConfigurationError("the adapter store is closed")
        if name in self._refused:
            raise ConfigurationError(_of_two(name))
        entry = self._entries.get(name)
        if entry is not None:
            return Origin(name, self._fetched, entry.sha256, entry)
        if self._folder is None:
            raise ConfigurationError(f"the catalogue names no adapter {ascii(name)[:200]}")
        return Origin(name, self._folder, name)

    def _digest_of(self, origin: Origin, opened: OpenAdapter | None) -> str | None:
        """Returns an adapter's digest; if it is not known yet, checks the adapter's settings and header and returns
        None.

        Args:
            origin: where the adapter's files are.
            opened: the adapter's files; None for an adapter of the catalogue, whose digest is pinned.
        """
        if opened is None:
            return None if origin.entry is None else origin.entry.sha256
        digest = self._known.digest(origin.name, opened.settled_stamp)
        if digest is None:
            self._host_loader.check(opened)
        return digest

    def _start(self, load_request: LoadRequest) -> OpenAdapter | None:
        """Has an adapter loaded in another thread. Returns the adapter's files if the loader does not take them; then
        callers must close them."""
        entry, opened = load_request.origin.entry, load_request.opened
        with self._lock:
            if self._closed:
                raise ConfigurationError("the adapter store is closed")
            self._pending.add(load_request.loan)
            if entry is None or (self._cache / entry.sha256).is_dir():
                is_taken = opened is not None and len(self._opened) < MOST_OPEN
                self.loader.submit(self._load, load_request if is_taken else replace(load_request, opened=None))
                if is_taken and opened is not None:
                    self._opened.add(opened)
                return None if is_taken else opened
            waiting = self._fetching.setdefault(entry.sha256, [])
            waiting.append(load_request)
            if len(waiting) == 1:
                self._fetchers.submit(self._fetch, load_request.origin.name, entry)
        return opened

    def _fetch(self, name: str, entry: Entry) -> None:
        """Fetches an adapter, and then loads it for all loans that wait for it. Only a fetching thread calls this
        method."""
        failure: VeilbaseError | None = None
        try:
            fetch(name, entry, self._cache, self._max_file_bytes)
        except VeilbaseError as exc:
            failure = exc
        except Exception as exc:  # noqa: BLE001 - whatever it is, those who wait must not wait for ever
            failure = ConfigurationError(f"the adapter {name} cannot be fetched ({type(exc).__name__})")
        with self._lock:
            load_requests = self._fetching.pop(entry.sha256, [])
            for load_request in load_requests if failure is None and not self._closed else []:
                self.loader.submit(self._load, load_request)
        if failure is not None:
            for load_request in load_requests:
                self._fail(load_request, failure)

    def _load(self, load_request: LoadRequest, first: bool = False) -> None:
        """Loads an adapter onto the device for a loan. Only the loading thread runs this, and only it assigns places.

        Args:
            load_request: the loan and the adapter to load.
            first: whether the loan has already waited for a place.
        """
        try:
            if load_request.loan.released:
                return
            self._place(load_request, self._packed(load_request), first)
        except VeilbaseError as exc:
            self._fail(load_request, exc)
        except Exception as exc:  # noqa: BLE001 - such as a device without memory; a loan must not wait for ever
            self._fail(
                load_request,
                ConfigurationError(f"the adapter {load_request.origin.name} cannot be loaded ({type(exc).__name__})"),
            )
        else:
            if load_request.loan.is_ready():
                self._settle(load_request.loan)
        finally:
            if load_request.opened is not None:
                with self._lock:
                    self._opened.discard(load_request.opened)
                load_request.opened.close()

    def _place(self, load_request: LoadRequest, packed: PackedAdapter | PackedModules, first: bool) -> None:
        try:
            self._placement.place(load_request, packed, first)
        except ConfigurationError as exc:
            if isinstance(packed, PackedModules):  # Modules are tried when they are made, which takes long.
                self._known.keep_failure(load_request.origin.name, packed.stamp, exc)
            raise

    def _packed(self, load_request: LoadRequest) -> PackedAdapter | PackedModules:
        """Returns an adapter from host memory; if it is not there, reads it from disk."""
        digest, origin, opened = load_request.digest, load_request.origin, load_request.opened
        found = None if digest is None else self._host.get(digest)
        if found is not None:
            return found
        with contextlib.ExitStack() as stack:
            if opened is None or not opened.is_unchanged():
                opened = stack.enter_context(origin.open())
            if origin.entry is not None:
                return self._host_loader.load(opened, origin.entry.sha256)
            # An earlier request for the same files, which came when their digest was not known either, may have read
            # them by now.
            digest = self._known.digest(origin.name, opened.settled_stamp)
            found = None if digest is None else self._host.get(digest)
            return found if found is not None else self._host_loader.load(opened)

    def _release(self, loan: AdapterLoan) -> None:
        rank = self._placement.release(loan)
        with self._lock:
            self._pending.discard(loan)
            if self._closed:
                return
            if loan.placed is not None and loan.digest in self._dropped:
                self.loader.submit(self._drop, loan.digest)
            if rank is not None:
                self.loader.submit(self._serve_waiting, rank)

    def _serve_waiting(self, rank: int) -> None:
        """Gives free places of a rank to the loans that wait for a place, in the order of waiting. Only the loading
        thread runs this."""
        while (load_request := self._placement.next_waiting(rank)) is not None:
            self._load(load_request, first=True)

    def _fail(self, load_request: LoadRequest, failure: VeilbaseError) -> None:
        load_request.loan.failure = failure
        self._settle(load_request.loan)

    def _settle(self, loan: AdapterLoan) -> None:
        """Tells the engine that a loan is ready or has failed."""
        with self._lock:
            self._pending.discard(loan)
        if self.on_ready is not None:
            self.on_ready()

    def _preload(self, names: Sequence[str]) -> None:
        for name in reversed(names):  # The first names are loaded last, so that they stay on the device.
            origin, loan = self._origin(name), AdapterLoan(name, self._release)
            if origin.entry is not None:
                fetch(name, origin.entry, self._cache, self._max_file_bytes)
            with contextlib.nullcontext() if origin.entry is not None else origin.open() as opened:
                digest = self._digest_of(origin, opened)
                self._load(LoadRequest(loan, origin, digest, opened))  # The loading thread has nothing to do yet.
            loan.release()
            if loan.failure is not None:
                raise loan.failure
