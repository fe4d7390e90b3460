"""Connects the ranks, the processes that compute together, over torch.distributed.

Guarantees: only tensors are sent, and no pickles. No wait is endless: a wait for a rank that is gone or too late ends
with `RankLost`. Traffic between ranks is neither encrypted nor authenticated, since gloo offers neither.
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
"""The longest time that ranks wait for each other at the start, since they load the model at different speeds."""
_LOOPBACK_NAMES = ("lo", "lo0")


class RankLost(Exception):
    """Says that a rank is gone or was too late. No further product is possible, since the ranks may be in different
    collectives (operations that all ranks perform together)."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Returns a context in which torch's RuntimeError for a peer that is gone or late becomes a RankLost. Every
    collective must run in such a context."""
    try:
        yield
    except RuntimeError as exc:
        raise RankLost(type(exc).__name__) from None  # The text names addresses.


class Ranks:
    """Holds this process's connections to the other ranks; all ranks must call the collectives in the same order."""

    def __init__(self, timeout_s: float) -> None:
        """Connects to the other ranks, which are found by the variables that torchrun sets.

        Args:
            timeout_s: the longest time in seconds that a product waits for another rank.

        Raises:
            ConfigurationError: the ranks cannot connect.
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
        """Checks that all ranks call this method with the same digest of 32 bytes.

        Raises:
            ConfigurationError: the digests differ, or a rank has ended; this is raised on every rank.
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
        """Sends a message from rank 0 to all other ranks, which must call `hear`. For small messages `tell` is faster
        than `broadcast`."""
        with together():
            sent = [dist.isend(message, rank, group=self.group) for rank in range(1, self.size)]
            for work in sent:
                if work is not None:
                    work.wait()

    def hear(self, message: torch.Tensor) -> torch.Tensor:
        """Receives into `message` the message that rank 0 sends by `tell`, and returns `message`."""
        with together():
            dist.recv(message, 0, group=self.group)
        return message

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's tensor into the tensor of every other rank, and returns it. All these tensors must be
        contiguous."""
        with together():
            dist.broadcast(tensor, 0, group=self.group)
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        with together():
            dist.send(tensor, 0, group=self.group)

    def receive(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Begins to receive into `tensor` what `rank` sends. Callers must call `wait` on the result before they read
        `tensor`."""
        with together():
            work = dist.irecv(tensor, rank, group=self.group)
        if work is None:
            raise RankLost("not a member")
        return work

    def reduce(self, tensor: torch.Tensor) -> None:
        """Adds the tensors of all ranks, and stores the sum in rank 0's tensor. Sums in int32 wrap mod 2^32
        (tests/provider/parallel)."""
        with together():
            dist.reduce(tensor, 0, group=self.group)

    def leave(self) -> None:
        """Closes the connections to the other ranks; this object cannot be used afterwards."""
        del self.group  # The connections stay open as long as anything refers to the group.
        with together():
            dist.destroy_process_group()


def _stay_on_loopback() -> None:
    """Makes gloo listen on loopback if all ranks are on this machine; by default gloo uses the host name's address. If
    GLOO_SOCKET_IFNAME is set, its value is kept."""
    environment = os.environ
    if environment.get("LOCAL_WORLD_SIZE", "0") == environment.get("WORLD_SIZE"):
        names = {name for _, name in socket.if_nameindex()}.intersection(_LOOPBACK_NAMES)
        for name in names:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
