"""This module defines the interfaces that transports implement: a `Connection`, and a `MessageStream` under it if the
transport carries frames. Both raise errors of wire/errors.py only, so nothing above them knows what carries a request.

A `Connection` carries many requests at once. Each `submit` returns a `Pending`, whose `result` waits for the reply or
for the request's own deadline. Connections are safe under threads and refuse to work in a forked child.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from wire.frame import Call
from wire.manifest import GroupInfo, Manifest
from wire.payload import Payload
from wire.usage import StreamTokens, UsageCounter, kind_of


@dataclass
class Traffic:
    """Counts the bytes and calls that crossed the wire. Bytes include frame headers but not the framing of TLS and
    HTTP/2.

    Attributes:
        bytes_up, bytes_down, calls: all that was sent and received.
        usage: what of this the provider counts too: requests that got a reply, by their kind.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    calls: int = 0
    usage: UsageCounter = field(default_factory=UsageCounter, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, up: int = 0, down: int = 0, calls: int = 0) -> None:
        """Adds bytes sent (`up`), bytes received (`down`) and calls to the counts; this is safe under threads."""
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down
            self.calls += calls

    def answered(self, call: Call, num_rows: int, up: int, down: int, stream: StreamTokens) -> None:
        """Counts a request whose reply is complete, of `num_rows` rows, in `usage`. `up` and `down` are the bytes of
        its payload and of that of its reply; `stream` has the tokens of the stream that carried it."""
        self.usage.answered(kind_of(call), call, num_rows, up, down, stream)

    def snapshot(self) -> Traffic:
        """Returns a copy of the counts, which later traffic does not change; its `usage` is zero."""
        with self._lock:
            return Traffic(self.bytes_up, self.bytes_down, self.calls)


NO_WEIGHTS = (
    "this provider gives this tenant no weights: name a checkpoint of your own (verify=, --verify), or ask the "
    "provider's operator for weight_bytes_per_day"
)
"""The text of the error if a provider gives no weights, or is of a release that gives none to anybody."""


class MessageStream(Protocol):
    """Carries messages in both directions: all that `Multiplexer` needs of a transport. `send` is safe under threads;
    only one thread at a time may call `step`."""

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and returns. Bytes that cannot be sent yet are sent in later calls of `step` or
        `wait_to_send`."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Tells whether a queued message still needs a `step` in order to be sent."""
        ...

    def wait_to_send(self, seconds: float) -> None:
        """Waits at most `seconds` until more bytes can be sent. This method is for a thread that sends while another
        thread calls `step`."""
        ...

    def step(self) -> bytes | memoryview | None:
        """Waits for a message, or for another event such as room to send.

        Returns:
            A message, or None after another event.

        Raises:
            EOFError: the peer ended the stream properly.
            VeilbaseError: the stream failed, in whatever way its transport reports that.
        """
        ...

    def is_active(self) -> bool:
        """Tells whether the stream is active; returns False once its end is known."""
        ...

    def close(self) -> None:
        """Ends the stream at once. Any thread may call this, more than once."""
        ...


class Pending(Protocol):
    """Stands for a request whose reply has not been read yet."""

    def result(self) -> torch.Tensor:
        """Waits for the reply and returns it.

        Returns:
            The reply, shape (rows of the request, reply_cols), in the dtype of the call's arithmetic. Callers must not
            write to it.

        Raises:
            VeilbaseError: one error of wire/errors.py, whatever went wrong.
        """
        ...


class Connection(Protocol):
    """Connects one tenant to one provider."""

    @property
    def traffic(self) -> Traffic:
        """Returns the counts of bytes and calls since the connection was made."""
        ...

    def manifest(self) -> Manifest:
        """Returns the provider's manifest. Only the first call fetches it."""
        ...

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one file of the bundle (the model's files without the base layers' weights)."""
        ...

    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        """Yields the chunks of a group's weight, never more bytes than the manifest announced: W̃ in row-major order,
        one byte a number, then α as little-endian float32. Nothing of it is checked here.

        Raises:
            NotPermitted: the provider gives this tenant no weights.
            QuotaExceeded: the provider gives this tenant no more weights today.
        """
        ...

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Sends one request. Callers must split what is larger than the limits.

        Args:
            call: which product is asked for.
            payload: the request's rows. They must not change until `result` has returned, since a retry after a refusal
                sends the same bytes again.
            reply_cols: the number of columns of the reply.

        Raises:
            VeilbaseError: `InvalidTensor` if the payload does not suit the call, or the error that keeps the request
                from being sent.
        """
        ...

    def reconnect(self) -> None:
        """Connects again if the connection is broken, and sends no request; `submit` does the same by itself.

        Raises:
            TransportError: the provider cannot be reached.
            ConfigurationError: the provider serves other weights than those of the first manifest.
        """
        ...

    def close(self) -> None:
        """Ends the connection; pending requests fail with `Unavailable`."""
        ...
