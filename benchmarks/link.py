"""Simulates two hosts on one machine, joined by a network link with a chosen delay and rate.

Each host is a network namespace with a TUN device. A process, the carrier, copies packets between the two devices. The
carrier sends the packets of each direction one after the other at the link's rate, and delivers each packet half a
round trip later. Packets stay in order, and none is lost. The carrier replaces `tc qdisc ... netem`, which many kernels
lack. Packets hold up to 64 KiB, as with segmentation offload. TCP, with its windows and acknowledgements, is the
kernel's own from end to end. The carrier uses a core of the same machine, so that its cost is part of every figure
measured across the link.

Namespaces and devices have no names outside this process and its children. They disappear when the last of these
processes ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

ADDRESSES = ("198.18.0.1", "198.18.0.2")
"""The addresses of the two hosts, from the block that RFC 2544 reserves for benchmarks of networks."""
RATE_BITS = 1_000_000_000
_MTU = 65_000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
"""Values from linux/if_tun.h, for a device from which each read returns one bare IP packet."""
_PACKETS_AT_ONCE = 64


class NoNamespaces(Exception):
    """Says that this user or this kernel cannot make network namespaces."""


def enter(path: str) -> None:
    """Moves this thread, and every thread and process that it starts, to the host of a `Hosts.path`."""
    host = os.open(path, os.O_RDONLY)
    try:
        _checked(_libc().setns(host, _CLONE_NEWNET))
    finally:
        os.close(host)


class Hosts:
    """Holds two hosts, 0 and 1, with the addresses of ADDRESSES, and the link between them, which has no delay at
    first."""

    def __init__(self) -> None:
        """Makes the hosts and the link.

        Raises:
            NoNamespaces: this user or this kernel cannot make network namespaces.
        """
        self._stack = ExitStack()
        try:
            self._namespaces = [self._new_namespace() for _ in ADDRESSES]
            devices = [self._new_device(number) for number in range(len(ADDRESSES))]
        except (OSError, subprocess.CalledProcessError) as exc:
            self.close()
            raise NoNamespaces(f"network namespaces joined by TUN devices cannot be made here ({exc})") from exc
        self._carrier = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.link", *map(str, devices)],
            stdin=subprocess.PIPE, pass_fds=devices, text=True,
        )  # fmt: skip
        self._stack.callback(self._end_carrier)

    def _new_namespace(self) -> int:
        home = self._keep(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        _checked(_libc().unshare(_CLONE_NEWNET))
        try:
            return self._keep(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        finally:
            _checked(_libc().setns(home, _CLONE_NEWNET))

    def _new_device(self, number: int) -> int:
        name = f"veil{number}"
        with self.inside(number):
            device = self._keep(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
            for command in (
                ["ip", "link", "set", "lo", "up"],
                ["ip", "addr", "add", f"{ADDRESSES[number]}/30", "dev", name],
                ["ip", "link", "set", name, "mtu", str(_MTU), "up"],
            ):
                subprocess.run(command, check=True, capture_output=True)
        return device

    def _keep(self, descriptor: int) -> int:
        self._stack.callback(os.close, descriptor)
        return descriptor

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Moves this thread, and every process that this thread starts, to host `number` inside the context."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _checked(_libc().setns(self._namespaces[number], _CLONE_NEWNET))
            try:
                yield
            finally:
                _checked(_libc().setns(home, _CLONE_NEWNET))
        finally:
            os.close(home)

    def path(self, number: int) -> str:
        """Returns the path with which another process can `enter` host `number` as long as the hosts exist."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[number]}"

    def set_round_trip(self, milliseconds: float) -> None:
        """Sets the round-trip time of the link. Each packet that is sent from then on takes half of this time."""
        if self._carrier.stdin is not None:
            self._carrier.stdin.write(f"{milliseconds}\n")
            self._carrier.stdin.flush()

    def measured_round_trip_ms(self, port: int, count: int = 9) -> float:
        """Returns the median time, in milliseconds, of `count` TCP handshakes of host 1 with a port of host 0."""
        times = []
        with self.inside(1):
            for _ in range(count):
                began = time.perf_counter()
                socket.create_connection((ADDRESSES[0], port), timeout=20).close()
                times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3

    def _end_carrier(self) -> None:
        if self._carrier.stdin is not None:
            self._carrier.stdin.close()
        self._carrier.wait(timeout=10)

    def close(self) -> None:
        """Ends the carrier process, and releases devices and namespaces."""
        self._stack.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Way:
    """Carries the packets of one direction, from the device `source` to the device `sink`."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._packets: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    @property
    def due(self) -> float:
        """Returns the time at which the next packet arrives, on the monotonic clock, or infinity."""
        return self._packets[0][0] if self._packets else float("inf")

    def take(self, delay_s: float) -> None:
        """Reads packets that the source host has sent, and sets the time at which each arrives."""
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(self._source, _MTU + 64)
            except BlockingIOError:
                return
            self._free_at = max(time.monotonic(), self._free_at) + 8 * len(packet) / RATE_BITS
            self._packets.append((self._free_at + delay_s, packet))

    def deliver(self) -> None:
        """Writes the packets whose time has come to the sink host."""
        while self._packets and self._packets[0][0] <= time.monotonic():
            os.write(self._sink, self._packets.popleft()[1])


def carry(one: int, other: int) -> None:
    """Runs the carrier between two TUN devices until standard input ends. Each line on standard input sets the round
    trip of the link, in milliseconds.

    Args:
        one, other: the file descriptors of the two devices.
    """
    ways, delay_s = {one: _Way(one, other), other: _Way(other, one)}, 0.0
    orders = sys.stdin.fileno()
    while True:
        wait_s = max(0.0, min(way.due for way in ways.values()) - time.monotonic())
        ready, _, _ = select.select([*ways, orders], [], [], min(wait_s, 1.0))
        if orders in ready:
            order = os.read(orders, 100).split()
            if not order:
                return
            delay_s = float(order[-1]) / 2e3
        for source, way in ways.items():
            if source in ready:
                way.take(delay_s)
        for way in ways.values():
            way.deliver()


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]))
