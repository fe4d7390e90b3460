"""This module holds the code that is common to all connections whose requests go on one long-lived stream of frames. It
opens a stream at first use, checks that the provider's weights have not changed, sends requests, and opens another
stream after one is broken.

Guarantees: a forked child is refused. Requests that were pending on a broken stream fail with one error and are never
sent again automatically, since that could reuse a mask. Only a request that the provider refused, naming a time, is
sent again, after that time and as the same bytes (wire/transport/retry.py). No request is sent on a stream before this
module has checked that the provider still serves the weights of the first manifest.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wire.errors import ConfigurationError, ForkedConnection, Unavailable
from wire.frame import Call
from wire.manifest import GroupInfo, Manifest
from wire.payload import Payload
from wire.transport.connection import MessageStream, Pending, Traffic
from wire.transport.multiplexer import Multiplexer

if TYPE_CHECKING:
    from wire.transport.ipc.window import TenantWindow

CROWDED_S = 15.0
"""Seconds for which a tenant retries if a provider closes new connections at once. A provider that is flooded with
connections accepts another one as soon as a connection has timed out."""
CROWDED_PAUSE_S = 0.01
"""The pause in seconds before the next try. It is short because a free place at a flooded port is taken within
milliseconds: with pauses of up to half a second a new tenant was not accepted within 15 s (tests/rpc/test_flood.py)."""
_LOGGER = logging.getLogger(__name__)


class StreamConnection(ABC):
    """Implements `Connection`, except for fetching the manifest and the bundle and for opening a stream, which
    subclasses do."""

    def __init__(self, url: str) -> None:
        """Keeps the address of the provider, and does not connect yet, so that a program may fork before that."""
        self.url = url
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._stream: Multiplexer | None = None
        self._compared: Multiplexer | None = None
        """The stream on which `_check_same_weights` has passed. Requests are sent on no other stream."""
        self._manifest: Manifest | None = None
        self._pid = os.getpid()
        self._closed = False

    @property
    @abstractmethod
    def carrier(self) -> str | None:
        """Returns how the newest stream is carried, in words; None before the first stream."""

    @abstractmethod
    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, never more than the manifest announced."""

    @abstractmethod
    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        """Yields the chunks of a group's weight, never more bytes than the manifest announced."""

    @abstractmethod
    def _fetch_manifest(self) -> Manifest:
        """Asks the provider for its present manifest."""

    @abstractmethod
    def _open_raw_stream(self, begun_with: Manifest) -> MessageStream:
        """Opens a stream on which nothing has been sent. `begun_with` is the first manifest."""

    def _take_window(self) -> TenantWindow | None:
        """Returns the window of the stream that `_open_raw_stream` opened last; by default there is none."""
        return None

    @abstractmethod
    def _drop(self) -> None:
        """Closes what is open besides the stream, so that the next call opens it anew."""

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedConnection(
                "this connection was opened before a fork: make a new TenantClient in the child, "
                "or start workers with the spawn method (dataloader_num_workers=0)"
            )
        if self._closed:
            raise Unavailable("the connection was closed")

    def manifest(self) -> Manifest:
        """Returns the provider's manifest. Only the first call fetches it."""
        with self._lock:
            if self._manifest is None:
                self._manifest = self._fetch_manifest()
            return self._manifest

    def _announced_bytes(self, file_name: str) -> int:
        """Returns the size of a bundle file as the manifest announces it."""
        sizes = {file.name: file.size_bytes for file in self.manifest().bundle}
        if file_name not in sizes:
            raise ConfigurationError(f"the provider's bundle has no file {file_name!r}")
        return sizes[file_name]

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Sends one request on the stream; see `Connection.submit`."""
        self._check_usable()
        payload.check(call)
        return self._usable_stream().submit(call, payload, reply_cols)

    def reconnect(self) -> None:
        """Opens a stream if there is none or it is broken; see `Connection.reconnect`."""
        self._check_usable()
        self._usable_stream()

    def _usable_stream(self) -> Multiplexer:
        stream = self._compared
        return self._open_stream() if stream is None or not stream.is_usable() else stream

    def _open_stream(self) -> Multiplexer:
        begun_with = self.manifest()
        with self._lock:
            if self._compared is None or not self._compared.is_usable():
                if self._stream is not None:
                    self._drop()
                raw = self._open_raw_stream(begun_with)
                self._stream = stream = Multiplexer(raw, begun_with.limits, self.traffic, self._take_window())
                try:
                    stream.wait_welcome()
                    self._check_same_weights(begun_with)
                except BaseException:
                    stream.close()
                    raise
                self._compared = stream
                _LOGGER.info("a stream is open, carried by %s", self.carrier)
            return self._compared

    def _check_same_weights(self, begun_with: Manifest) -> None:
        """Checks that the provider still serves the weights of the first manifest. A provider that was restarted with
        another model must not compute on rows that were meant for the first model.

        This is called after WELCOME: if the provider is replaced between this manifest and the first request, the
        stream breaks. This check is no defence against a provider that lies; verification is.
        """
        now = self._fetch_manifest()
        self._check_place(now)
        if (now.weights, now.groups) != (begun_with.weights, begun_with.groups):
            raise ConfigurationError(
                "the provider serves other weights than when this session began, and nothing was sent to it: "
                "ask its operator for the first ones, or begin a new session"
            )

    def _check_place(self, now: Manifest) -> None:
        """Checks that the newest stream leads to the provider that sent `now`, the present manifest. A subclass can do
        this if the manifest says at which port its provider listens; by default nothing is checked."""
        return

    def close(self) -> None:
        """Ends the stream and closes what else is open."""
        if os.getpid() != self._pid:
            return  # The parent's sockets are not the child's to close.
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        self._drop()
