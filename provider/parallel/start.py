"""`provider serve --parallel`: of the processes that torchrun starts, rank 0 is the provider, the others help it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence

import torch

from provider.config import ProviderSettings
from provider.engine.products import together
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import PreparedModel, return_freed_memory, serve_model
from provider.operations.recording import Recorder
from provider.parallel.dispatch import Dispatcher, follow
from provider.parallel.ranks import RankLost, Ranks
from provider.parallel.sharding import Sharding, without_weights
from provider.parallel.tensor_parallel import ColumnSlices
from wire.errors import Unavailable
from wire.frame import Call
from wire.ring.seeded_rows import Rows

_LOGGER = logging.getLogger(__name__)


class ParallelModel(ServedModel):
    """The model as rank 0's serves it: all ranks make its products, one at a time."""

    can_share = False

    def __init__(self, served: PreparedModel, dispatcher: Dispatcher, recorder: Recorder | None = None) -> None:
        """Args: served: the model, without weights here."""
        super().__init__(served, recorder)
        self._dispatcher = dispatcher

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Makes one product; see `Dispatcher`."""
        return self._dispatcher(call, rows)

    def row_product(self, call: Call) -> None:
        """Returns None, since no rank makes a product alone."""

    def compute_together(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Makes one product of all rows, by all ranks."""
        return together(self._dispatcher, call, parts)

    def close(self) -> None:
        """Ends the other ranks and the recording."""
        try:
            self._dispatcher.close()
        finally:
            super().close()


def meet(timeout_s: float) -> Ranks:
    """Waits for all ranks; until they are there a signal ends this process at once, as nothing has begun.

    Raises:
        ConfigurationError: the ranks cannot meet.
    """
    with _ended_by_signals():
        return Ranks(timeout_s)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets signals end the process: a handler in Python would wait until the call into torch returns."""
    if threading.current_thread() is not threading.main_thread():  # Only the main thread may set handlers.
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def lead(
    settings: ProviderSettings, ranks: Ranks, served: PreparedModel, recorder: Recorder | None = None
) -> ParallelModel:
    """Makes the core of rank 0, which keeps its share of the weights.

    Args:
        settings: the settings, with `parallel` set.
        ranks: all ranks.
        served: the whole weights; the caller drops them.
        recorder: the recorder, or None.

    Raises:
        ConfigurationError: another rank has other weights, or ended.
    """
    sharding = take_share(settings.parallel, ranks, served)
    described = without_weights(served)
    return ParallelModel(described, Dispatcher(described, ranks, sharding, settings.parallel_timeout_s), recorder)


def help_out(settings: ProviderSettings) -> None:
    """Runs any other rank, until rank 0 stops.

    Args:
        settings: the settings of rank 0.

    Raises:
        ConfigurationError: the model cannot be loaded, or another rank has other weights, or ended.
        Unavailable: rank 0 is gone.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    ranks = meet(settings.parallel_timeout_s)
    served = serve_model(load(resolve(settings.model)), settings.weights, settings.base_layers)
    served.bundle.close()  # Rank 0 hands the bundle out.
    sharding = take_share(settings.parallel, ranks, served)
    del served
    return_freed_memory()
    _LOGGER.info("rank %d of %d holds its share", ranks.rank, ranks.size)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # torchrun tells every rank to stop, but rank 0 has requests to answer.
    try:
        follow(ranks, sharding)
    except RankLost:
        raise Unavailable(f"rank {ranks.rank} ends: another rank is gone, or too late") from None


def take_share(parallel: str, ranks: Ranks, served: PreparedModel) -> Sharding:
    """Compares the whole weights with the other ranks', and keeps this rank's part; the caller drops `served`.

    Raises:
        ConfigurationError: another rank has other weights, or ended.
    """
    ranks.check_equal(fingerprint(parallel, served))
    if parallel == "fsdp":
        from provider.parallel.fsdp import GatheredLayers  # This takes a second and a half to import.

        return GatheredLayers(served, ranks)
    return ColumnSlices(served, ranks.rank, ranks.size)


def fingerprint(parallel: str, served: PreparedModel) -> bytes:
    """Returns 32 bytes of all that ranks must have in common: how they share, and every number of the weights."""
    sha = hashlib.sha256(f"{parallel} {served.manifest.weights} {len(served.groups)}\n".encode())
    for group in served.groups:
        sha.update(group.fingerprint().encode())
    return sha.digest()
