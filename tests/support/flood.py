"""Runs many clients without a certificate that connect, send nothing, and connect again when they are dropped.

The clients run in a process of their own, `python flood.py PORT CLIENTS`, so that they do not compete with the test for
its interpreter.
"""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import sys
import time

_LOOK_S, _PATIENCE_S = 0.05, 10.0


class Flood:
    """Keeps a fixed number of connections open or being opened."""

    def __init__(self, port: int, num_clients: int) -> None:
        self._address, self._num_clients = ("127.0.0.1", port), num_clients
        self._selector = selectors.DefaultSelector()

    def _connect(self) -> None:
        plain = socket.socket()
        plain.setblocking(False)
        if plain.connect_ex(self._address) in (0, errno.EINPROGRESS):
            self._selector.register(plain, selectors.EVENT_READ)
        else:
            plain.close()

    def fill(self) -> None:
        """Opens connections until there are `num_clients` of them."""
        while len(self._selector.get_map()) < self._num_clients:
            self._connect()

    def step(self) -> int:
        """Replaces the connections that were dropped, and returns the number of these."""
        num_dropped = 0
        for key, _ in self._selector.select(_LOOK_S):
            plain = key.fileobj
            assert isinstance(plain, socket.socket)
            try:
                if plain.recv(1 << 12):  # TLS sends an alert before it ends
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._selector.unregister(plain)
            plain.close()
            num_dropped += 1
        self.fill()
        return num_dropped


def main() -> None:
    """Floods until the process is killed. Prints a line when the flood has reached its full strength.

    The flood is at full strength when as many connections were dropped as there are clients. The line is printed after
    10 seconds at the latest.
    """
    port, num_clients = map(int, sys.argv[1:])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    flood, num_dropped, was_told = Flood(port, num_clients), 0, False
    flood.fill()
    told_by = time.monotonic() + _PATIENCE_S
    while True:
        num_dropped += flood.step()
        if not was_told and (num_dropped >= num_clients or time.monotonic() >= told_by):
            was_told = True
            print("flooding", flush=True)


if __name__ == "__main__":
    main()
