"""Runs a relay between a tenant and a provider, which passes on every byte and keeps a copy. It is a process of its
own, as a real relay is, because the kernel tells each end which process is at the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CODE = """
import os, socket, sys, threading
family, listen_at, target, record, uid = sys.argv[1:]
if int(uid):
    os.setuid(int(uid))
family = getattr(socket, family)
address = (lambda text: text) if family == socket.AF_UNIX else (lambda text: ("127.0.0.1", int(text)))
kept, lock = open(record, "wb", buffering=0), threading.Lock()
listener = socket.socket(family)
listener.bind(address(listen_at))
listener.listen()
print("ready", listener.getsockname()[1] if family == socket.AF_INET else listen_at, flush=True)

def pump(source, sink):
    try:
        while data := source.recv(1 << 16):
            with lock:
                kept.write(data)
            sink.sendall(data)
    except OSError:
        pass
    for one in (source, sink):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

while True:
    near, _ = listener.accept()
    far = socket.socket(family)
    far.connect(address(target))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class Relay:
    """Runs a relay in a process of its own, until `close` is called."""

    def __init__(self, record: Path, target: str | int, listen_at: Path | None = None, uid: int = 0) -> None:
        """Starts the relay, and waits until it listens.

        Args:
            record: the file that gets every byte of either direction.
            target: the path of the provider's socket, or the provider's port on this machine.
            listen_at: the path to listen at; None for a port of its own choice.
            uid: the user as whom it runs; 0 for the test's own user.
        """
        self._record = record
        family = "AF_INET" if listen_at is None else "AF_UNIX"
        command = [sys.executable, "-c", _CODE, family, str(listen_at or 0), str(target), str(record), str(uid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        word, self.place = self._process.stdout.readline().split()
        assert word == "ready"

    @property
    def recorded(self) -> bytes:
        """Returns all bytes that were passed on so far."""
        return self._record.read_bytes()

    def close(self) -> None:
        """Ends the relay's process."""
        self._process.kill()
        self._process.communicate()
