"""This module runs an endpoint: it opens the engine and the socket, serves, and ends. `serve_command` does so for the
command `tenant serve`, whose options tenant_sdk/cli.py parses.

The server limits how many connections there are, how long one may stay idle, and how long a client may leave a response
unread.

Guarantees: nothing listens before `check_may_listen` has passed. If a reply of the provider fails its check, the server
ends all requests under way with an error, stops, and does not start again by itself. A connection over the limit gets
one fixed response and is closed. A connection is also closed if it has no request for `idle_s` seconds, or if its
client leaves a response unread for `stall_s` seconds. Its requests are then cancelled, so that others can run. With
TLS, a handshake takes `handshake_s` seconds at most, and if there are as many unfinished handshakes as connections are
allowed, a new one ends the oldest. At most `MOST_ENDING` connections beyond the limit may be in the middle of closing,
so that clients that delay the close cannot use up file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tenant_sdk.endpoint.app import App
from tenant_sdk.endpoint.errors import HttpError, to_bytes
from tenant_sdk.endpoint.http import log_request
from tenant_sdk.endpoint.jobs import JobRoutes, Jobs, Turns
from tenant_sdk.endpoint.models import ModelNames
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.endpoint.service import Service, Threads
from tenant_sdk.endpoint.settings import (
    OPTION_KINDS,
    EndpointKeywords,
    EndpointLimits,
    EndpointSettings,
    bound,
    check_may_listen,
    new_key,
    options_given,
)
from tenant_sdk.endpoint.uploads import Uploads
from tenant_sdk.explain import ONLY_IN_USE, folded, not_in_use
from tenant_sdk.options import takes_options
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.reader import AdapterFolder
from tenant_sdk.serving.engine import Engine
from tenant_sdk.session_protocol import TrainingSession
from wire.errors import ConfigurationError, VeilbaseError

if TYPE_CHECKING:
    from tenant_sdk.plan_file import Bill


_FULL_RETRY_S = 1.0
MOST_ENDING = 32
"""Limits two counts of TLS connections that are closing: those over the connection limit, which still get a response,
and those whose handshake was ended, which the event loop has not closed yet."""


class ListeningSocket(socket.socket):
    """Accepts connections, and shuts the oldest one whose handshake is not complete when too many of them wait."""

    def __init__(self, family: int, kind: int, protocol: int, limits: EndpointLimits, has_tls: bool) -> None:
        """Makes a socket that is not bound yet.

        Args:
            family, kind, protocol: as for `socket.socket`.
            limits: the limits for clients.
            has_tls: whether connections begin with a handshake.
        """
        super().__init__(family, kind, protocol)
        self.limits = limits
        self.has_tls = has_tls
        self._handshakes: dict[int, socket.socket] = {}
        self._shut: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection and its client's address.

        Raises:
            BlockingIOError: no connection waits, or the event loop must first close `MOST_ENDING` connections that
                were shut here. The event loop then calls this method again.
        """
        self._shut = [one for one in self._shut if one.fileno() >= 0]
        if len(self._shut) >= MOST_ENDING:
            raise BlockingIOError
        connection, address = super().accept()
        if self.has_tls:
            self._handshakes = {number: one for number, one in self._handshakes.items() if one.fileno() == number}
            if len(self._handshakes) >= self.limits.connections:
                oldest = self._handshakes.pop(next(iter(self._handshakes)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its transport notices, and closes it
                self._shut.append(oldest)
            self._handshakes[connection.fileno()] = connection
        return connection, address

    def complete(self, descriptor: int) -> None:
        """Notes that the handshake of the connection with this file descriptor is complete."""
        self._handshakes.pop(descriptor, None)


class EventLoop(asyncio.SelectorEventLoop):
    """Gives clients less time for a TLS handshake than asyncio's 60 seconds, for which uvicorn has no setting."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Returns a server, which gets the handshake limit of its `ListeningSocket` if it uses TLS."""
        listening = options.get("sock")
        if isinstance(listening, ListeningSocket) and options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = listening.limits.handshake_s
        return await super().create_server(*args, **options)


def _protocol_class(listening: ListeningSocket) -> type[asyncio.Protocol]:
    """Returns a subclass of uvicorn's HTTP/1.1 protocol that applies a socket's limits to its connections."""
    limits = listening.limits

    class LimitedProtocol(H11Protocol):
        """Serves one connection."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._idle: asyncio.TimerHandle | None = None
            self._stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            listening.complete(transport.get_extra_info("socket").fileno())
            # Without TLS a connection ends at once, whatever its client does, so each gets the response.
            if listening.has_tls and len(self.connections) > limits.connections + MOST_ENDING:
                transport.abort()
            elif len(self.connections) > limits.connections:
                transport.write(_whole_response(b"429 Too Many Requests", _FULL))
                transport.close()
                log_request("-", "-", _FULL.status, _FULL.code, 0.0)
            else:
                self._idle = self.loop.call_later(limits.idle_s, transport.abort)

        def handle_events(self) -> None:
            cycle = self.cycle
            super().handle_events()
            if self.cycle is not cycle:  # a whole head has arrived: from now on the request has limits of its own
                self._end_timers()

        def on_response_complete(self) -> None:
            # uvicorn starts its own timer for the next request now, and stops it when any byte of it arrives.
            super().on_response_complete()
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                self._end_timers()
                self._idle = self.loop.call_later(limits.idle_s, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stalled is None:
                self._stalled = self.loop.call_later(limits.stall_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()  # an answer is under way, in which nothing else may stand
                return
            self.transport.write(_whole_response(b"400 Bad Request", _MALFORMED))  # uvicorn's own answer is no JSON
            self.transport.close()
            log_request("-", "-", _MALFORMED.status, _MALFORMED.code, 0.0)

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_timers()
            if self._stalled is not None:
                self._stalled.cancel()
            super().connection_lost(exc)

        def _end_timers(self) -> None:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None

    return LimitedProtocol


def _whole_response(line: bytes, error: HttpError) -> bytes:
    body = to_bytes(error.body())
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
        *error.headers(),
    ]  # fmt: skip
    head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return b"HTTP/1.1 " + line + b"\r\n" + head + b"\r\n" + body


_FULL = HttpError(
    429, "too many connections are open: try again later", "too_many_connections", retry_s=_FULL_RETRY_S
)  # fmt: skip
_MALFORMED = HttpError(400, "expected HTTP/1.1", "invalid_http")


_SEND_BUFFER_BYTES = 64 << 10
_JOBS_FOLDER = ".jobs"
"""The subfolder for jobs and uploads in the folder of adapters. No adapter has this name, since it begins with a
dot."""
GRACE_S = 5.0
"""The seconds that running requests get to finish when the server stops. After them, a request gets an error."""
_LAST_WORDS_S = 2
"""The seconds that these errors get to be sent."""


class ServedSession(TrainingSession, Protocol):
    """Describes a session that an endpoint serves; `TenantClient` fulfils it."""

    @property
    def mask(self) -> str:
        """Returns the name of the mask in force."""

    @property
    def error_sigma(self) -> float:
        """Returns the standard deviation of the error that the lattice mask leaves in a row, with that of rounding, in
        units of encoded rows; 0 for other masks."""

    def explain(self) -> str:
        """Prints and returns the privacy in force."""

    @property
    def is_verified(self) -> bool:
        """Returns whether every reply is checked against a trusted checkpoint."""

    def plan_tokens(self, prompt_tokens: int, new_tokens: int, requests: int = 1, *, probe_s: float = 10.0) -> Bill:
        """Returns what answers will cost; see `TenantClient.plan_tokens`."""


class Endpoint:
    """Serves a client's model over HTTP until it is stopped. As a context manager it serves in a thread.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme", verify="smollm2-135m") as client:
            with Endpoint(client, "adapters/") as endpoint:
                print(endpoint.url, endpoint.key)
    """

    @takes_options(*OPTION_KINDS)
    def __init__(
        self,
        client: ServedSession,
        adapters: str | Path | None = None,
        settings: EndpointSettings | None = None,
        *,
        on_ready: Callable[[str], None] | None = None,
        **options: Unpack[EndpointKeywords],
    ) -> None:
        """Opens the engine and the socket. Serving begins with `run` or with the `with` statement.

        Args:
            client: a connected client, which must stay open while the endpoint serves.
            adapters: the folder of adapters; None serves only the base model, and the adapters of a catalogue.
            settings: where to listen and what to release; by default loopback, with a new key.
            on_ready: called with the base URL when the endpoint accepts requests.
            **options: those of `EndpointOptions`, `EngineOptions` and `StoreOptions`.

        Raises:
            ConfigurationError: the settings do not allow this endpoint, an option is impossible or has no effect, or
                the address cannot be used.
        """
        given = settings or EndpointSettings()
        self.settings = given if given.key else replace(given, key=new_key(), is_own_key=False)
        check_may_listen(self.settings, client.is_verified)
        own, engine_options, store_options = options_given(adapters, options)
        released = Released(client.mask, self.settings.release_step, client.error_sigma)
        self._ended_by: VeilbaseError | None = None
        self.root = None if adapters is None else Path(adapters)
        self.has_catalogue = store_options.get("catalogue") is not None
        self._on_ready = on_ready
        self._turns = Turns()
        stores: list[AdapterStore] = []

        def make_store(model: Any, wake: Callable[[], None]) -> AdapterStore:
            stores.append(AdapterStore(model, self.root, on_ready=wake, **store_options))
            return stores[0]

        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(_listening(self.settings))
            self.engine = undo.enter_context(
                Engine(
                    client,
                    make_store if self.root or store_options.get("catalogue") is not None else None,
                    max_waiting=own.max_waiting,
                    default_new_tokens=own.default_max_tokens,
                    during_step=self._turns.step,
                    **engine_options,
                )
            )
            names = ModelNames(client.connect().model_id, next(iter(stores), None), self.root)
            privacy = _explained(client, self.engine, released)
            self.service = Service(client, self.engine, names, released, self.settings, privacy, self._end)
            undo.callback(self.service.close)
            jobs = None if self.root is None else self._open_jobs(client, self.root, stores[0], undo)
            app = App(self.service, jobs)
            self._server = _Server(self._config(app), self._ready, app.ending.come, self.service.threads)
            self._opened = undo.pop_all()
        self._thread = threading.Thread(target=self._serve, name="veilbase-endpoint", daemon=True)
        self._answers = threading.Event()

    @property
    def url(self) -> str:
        """Returns the base URL for clients, with the port on which the endpoint listens."""
        host, port = self._socket.getsockname()[:2]
        return f"{self.settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @property
    def key(self) -> str:
        """Returns the API key that requests must carry."""
        return self.settings.key

    @property
    def is_serving(self) -> bool:
        """Returns whether the thread of the `with` statement serves requests."""
        return self._thread.is_alive()

    @property
    def ended_by(self) -> VeilbaseError | None:
        """Returns the error that ended the endpoint for good; None if there was none."""
        return self._ended_by

    def explain(self, everything: bool = False) -> str:
        """Prints and returns a text about the privacy in force, what the engine reveals to the provider, and which
        numbers this endpoint releases to its clients.

        Args:
            everything: whether lines about DoRA, about other kinds of adapters and about fine-tuning are there although
                no adapter of the folder is of these kinds and no job was made; a line names those that are left out.
        """
        left_out = set() if everything or self.has_catalogue else _not_in_use(self.root)
        text = folded(self.service.privacy, left_out)
        print(text)
        return text

    def run(self) -> None:
        """Serves in this thread until Ctrl-C, `stop`, or an error that cannot be recovered from.

        Raises:
            VeilbaseError: the error after which the endpoint cannot serve, such as a reply that failed its check.
        """
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.close()
        if self._ended_by is not None:
            raise self._ended_by

    def stop(self) -> None:
        """Stops serving. No further requests are accepted, and running requests get a few seconds to finish."""
        self._server.should_exit = True

    def close(self) -> None:
        """Stops the running job, and closes the engine and the socket."""
        self._opened.close()

    def _end(self, error: VeilbaseError) -> None:
        logging.getLogger("veilbase.endpoint").error("ended for good (%s)", type(error).__name__)
        self._ended_by = error
        self.stop()

    def _ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready(self.url)
        self._answers.set()

    def _open_jobs(
        self, client: ServedSession, root: Path, store: AdapterStore, undo: contextlib.ExitStack
    ) -> JobRoutes:  # fmt: skip
        folder = root / _JOBS_FOLDER
        self.jobs = Jobs(
            client, folder, root, self.service.note_job, self.service.released.rounded_loss, self._turns.pause,
            store.names,
        )  # fmt: skip
        self.service.count_jobs = self.jobs.counts
        undo.callback(self.jobs.close)
        return JobRoutes(self.service.names.base, Uploads(folder / "files", self.settings.limits), self.jobs)

    def _config(self, app: App) -> uvicorn.Config:
        settings = self.settings
        return uvicorn.Config(
            app, http=_protocol_class(self._socket), ws="none", lifespan="off",
            loop=f"{EventLoop.__module__}:{EventLoop.__name__}",
            log_config=None, log_level="critical", access_log=False, proxy_headers=False, server_header=False,
            workers=1, timeout_keep_alive=round(settings.limits.idle_s),
            timeout_graceful_shutdown=round(GRACE_S) + _LAST_WORDS_S,
            h11_max_incomplete_event_size=32 << 10, ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
        )  # fmt: skip

    def _serve(self) -> None:
        with contextlib.suppress(VeilbaseError):  # kept in `ended_by`
            self.run()

    def __enter__(self) -> Endpoint:
        """Starts to serve in a thread, and returns when the endpoint accepts requests.

        Raises:
            VeilbaseError: the endpoint ended before it was ready.
        """
        self._thread.start()
        while not self._answers.wait(0.1):
            if not self._thread.is_alive():
                raise self._ended_by or ConfigurationError("the endpoint ended before it was ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stops serving, and waits until the thread has ended."""
        self.stop()
        self._thread.join()


def _not_in_use(root: Path | None) -> set[str]:
    """Returns those of `ONLY_IN_USE` that do not apply to the adapters and jobs of a folder; none of them if an
    adapter's settings cannot be read."""
    if root is None:
        return set(ONLY_IN_USE)
    if next((root / _JOBS_FOLDER).glob("ftjob-*"), None) is not None:
        return set()
    try:
        folder = AdapterFolder(root)
        found = [each for name in folder.names() if (each := folder.settings(name)) is not None]
        return not_in_use([SimpleNamespace(**{"peft_type": "", **each}) for each in found])
    except (VeilbaseError, RecursionError):
        return set()


def _explained(client: ServedSession, engine: Engine, released: Released) -> str:
    """Returns the text of `Endpoint.explain`, a line for each subject, without printing it."""
    with contextlib.redirect_stdout(io.StringIO()):
        parts = [client.explain(), engine.explain()]
    return "\n".join([*parts, f"{'released':<17}  {released.explain()}"])


class _Server(uvicorn.Server):
    """Runs uvicorn's server, and calls a function when the server accepts requests, and one when it ends and the
    requests under way have had their time."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_end: Callable[[], None], threads: Threads
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._on_ready, self._on_end, self._threads = on_ready, on_end, threads

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and then calls the function."""
        asyncio.get_running_loop().set_default_executor(self._threads)
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, waits for the requests under way, and ends those that take too long."""
        timer = asyncio.get_running_loop().call_later(GRACE_S, self._on_end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._on_end()  # after a second signal, nobody has waited


def _listening(settings: EndpointSettings) -> ListeningSocket:
    """Returns a socket that is bound to the address of the settings; raises as `bound` does."""

    def make(family: int, kind: int, protocol: int) -> ListeningSocket:
        made = ListeningSocket(family, kind, protocol, settings.limits, settings.tls_cert is not None)
        # Connections inherit it: without a bound, the kernel keeps megabytes for a client that does not read.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return made

    return bound(settings, make)
