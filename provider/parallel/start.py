"""Starts `provider serve --parallel`: torchrun starts several processes, the ranks. Rank 0 is the provider, and the
other ranks compute parts of its products."""

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
from provider.parallel.sharding import ColumnSlices, Sharding, without_weights
from wire.errors import Unavailable
from wire.frame import Call
from wire.ring.seeded_rows import Rows

_LOGGER = logging.getLogger(__name__)


class ParallelModel(ServedModel):
    """Serves the model on rank 0; all ranks compute each product together, one product at a time."""

    can_share = False

    def __init__(self, served: PreparedModel, dispatcher: Dispatcher, recorder: Recorder | None = None) -> None:
        """Keeps the model, which has no weights on this rank, and the dispatcher, which computes."""
        super().__init__(served, recorder)
        self._dispatcher = dispatcher

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        return self._dispatcher(call, rows)

    def row_product(self, call: Call) -> None:
        """Returns None: there is no function that computes one row's product, since no rank can compute a product
        alone."""

    def compute_together(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the product of each of several matrices; the ranks compute one product of all rows together."""
        return together(self._dispatcher, call, parts)

    def close(self) -> None:
        """Makes the other ranks end, and ends the recording."""
        try:
            self._dispatcher.close()
        finally:
            super().close()


def meet(timeout_s: float) -> Ranks:
    """Waits until all ranks are connected. SIGTERM or SIGINT during the wait ends this process at once, since no work
    has to be finished.

    Raises:
        ConfigurationError: the ranks cannot connect.
    """
    with _ended_by_signals():
        return Ranks(timeout_s)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGINT end the process at once during the `with` block; a handler in Python would run only after
    the call into torch returns. Outside the main thread, which alone may set handlers, this changes nothing."""
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
    """Makes the model that rank 0 serves, with rank 0's share of the weights.

    Args:
        settings: the settings, with `parallel` set.
        ranks: the connections to the other ranks.
        served: the model with whole weights; the caller should drop it afterwards.
        recorder: records requests and replies; None if there is no recording.

    Raises:
        ConfigurationError: another rank has different weights, or has ended.
    """
    sharding = _take_share(settings.parallel, ranks, served)
    described = without_weights(served)
    return ParallelModel(described, Dispatcher(described, ranks, sharding, settings.parallel_timeout_s), recorder)


def help_out(settings: ProviderSettings) -> None:
    """Runs a rank other than 0: loads the model, keeps only this rank's share of the weights, and computes parts of
    products until rank 0 stops.

    Args:
        settings: the settings, which must be the same as on rank 0.

    Raises:
        ConfigurationError: the model cannot be loaded, or another rank has different weights or has ended.
        Unavailable: another rank is gone or too late.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    ranks = meet(settings.parallel_timeout_s)
    served = serve_model(load(resolve(settings.model)), settings.weights, settings.base_layers)
    served.bundle.close()  # Only rank 0 sends the bundle to tenants.
    sharding = _take_share(settings.parallel, ranks, served)
    del served
    return_freed_memory()
    _LOGGER.info("rank %d of %d holds its share", ranks.rank, ranks.size)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Rank 0, which also gets the signal, must finish its requests first.
    try:
        follow(ranks, sharding)
    except RankLost:
        raise Unavailable(f"rank {ranks.rank} ends: another rank is gone, or too late") from None


def _take_share(parallel: str, ranks: Ranks, served: PreparedModel) -> Sharding:
    """Checks that all ranks have the same weights, and returns this rank's share of the weights; the caller should drop
    `served` afterwards.

    Raises:
        ConfigurationError: another rank has different weights, or has ended.
    """
    ranks.check_equal(fingerprint(parallel, served))
    if parallel == "fsdp":
        from provider.parallel.fsdp import GatheredLayers  # Imported here since this takes a second and a half.

        return GatheredLayers(served, ranks)
    return ColumnSlices(served, ranks.rank, ranks.size)


def fingerprint(parallel: str, served: PreparedModel) -> bytes:
    """Returns the SHA-256, 32 bytes, of everything that must be the same on all ranks: the value of `--parallel`, and
    the weights."""
    sha = hashlib.sha256(f"{parallel} {served.manifest.weights} {len(served.groups)}\n".encode())
    for group in served.groups:
        sha.update(group.fingerprint().encode())
    return sha.digest()
