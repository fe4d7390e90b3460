"""The processes that compute together, over torch.distributed: only tensors pass between them, and nothing is pickled.

Guarantees: every wait ends, with `RankLost` where another rank has died or does not answer in time. What passes between
ranks is neither secret nor authenticated; gloo offers neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from wire.errors import ConfigurationError

_START_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other at the start, since they load the model at different speeds."""
_LOOPBACK_NAMES = ("lo", "lo0")


class RankLost(Exception):
    """A rank has died, or was too late: nothing can go on, since the ranks may be at different collectives."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Surrounds every collective: torch reports a peer that is gone, and one that is late, as RuntimeError."""
    try:
        yield
    except RuntimeError as exc:
        raise RankLost(type(exc).__name__) from None  # The text names addresses.


class Ranks:
    """This process's place among the others; all ranks call every method in the same order."""

    def __init__(self, timeout_s: float) -> None:
        """Meets the other ranks, by the variables that torchrun sets.

        Args:
            timeout_s: the longest that a product waits for another rank.

        Raises:
            ConfigurationError: the ranks cannot meet.
        """
        _stay_on_loopback()
        try:
            dist.init_process_group("gloo", timeout=_START_TIMEOUT)
            group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as exc:
            raise ConfigurationError(f"the ranks cannot meet: {str(exc).splitlines()[0][:200]}") from exc
        self.group: dist.ProcessGroup = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def check_equal(self, digest: bytes) -> None:
        """Compares 32 bytes of every rank.

        Raises:
            ConfigurationError: they differ, or a rank has ended meanwhile; every rank raises it.
        """
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        try:
            with together():
                dist.all_gather(found, own)
        except RankLost as exc:
            raise ConfigurationError("another rank ended before it had its weights: its log says why") from exc
        if any(not torch.equal(one, own) for one in found):
            raise ConfigurationError(
                "the ranks do not hold the same weights: give all the same model, settings and versions"
            )

    def tell(self, message: torch.Tensor) -> None:
        """Sends from rank 0 to all others, which wait in `hear`: faster than a broadcast for small messages."""
        with together():
            sent = [dist.isend(message, rank, group=self.group) for rank in range(1, self.size)]
            for work in sent:
                if work is not None:
                    work.wait()

    def hear(self, message: torch.Tensor) -> torch.Tensor:
        """Receives what rank 0 sends by `tell`."""
        with together():
            dist.recv(message, 0, group=self.group)
        return message

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's numbers into the same memory on every rank; it must be contiguous."""
        with together():
            dist.broadcast(tensor, 0, group=self.group)
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Sends to rank 0."""
        with together():
            dist.send(tensor, 0, group=self.group)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begins to fill `tensor` with what `rank` sends; the caller must `wait` before reading it."""
        with together():
            work = dist.irecv(tensor, rank, group=self.group)
        if work is None:
            raise RankLost("not a member")
        return work

    def reduce(self, tensor: torch.Tensor) -> None:
        """Adds up every rank's numbers, in rank 0's memory; int32 wraps mod 2^32 (tests/provider/parallel)."""
        with together():
            dist.reduce(tensor, 0, group=self.group)

    def leave(self) -> None:
        """Closes the connections; nothing can be done with this object afterwards."""
        del self.group  # They stay open as long as anything refers to the group.
        with together():
            dist.destroy_process_group()


def _stay_on_loopback() -> None:
    """Makes gloo listen on loopback where all ranks are on this machine; by itself it takes the host name's address."""
    environment = os.environ
    if environment.get("LOCAL_WORLD_SIZE", "0") == environment.get("WORLD_SIZE"):
        names = {name for _, name in socket.if_nameindex()}.intersection(_LOOPBACK_NAMES)
        for name in names:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
