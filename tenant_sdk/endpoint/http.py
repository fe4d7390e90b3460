"""This module receives requests and sends responses. It reads bodies within limits, sends JSON or server-sent events,
and cancels the work for a request whose client goes away. `App` (app.py) counts requests, and turns failures into
responses.

A body may be a form with a file (multipart/form-data, RFC 7578), as clients send it to `/v1/files`.

Guarantees:
- unless its client goes away, a request gets one response of OpenAI's form, also if the server ends before the work is
  done: it is then a 503, or the last event of a stream that has begun;
- the time of `read_form` is proportional to the size of the body, whatever it holds, and nothing of the body is decoded
  besides a few header lines. The standard library's parser for e-mail, which can also read forms, guarantees neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from tenant_sdk.endpoint.errors import HttpError, bad_request, to_bytes
from tenant_sdk.endpoint.settings import EndpointLimits

Events = AsyncIterator[dict[str, Any]]
Reply = dict[str, Any] | Events
Work = Callable[[bytes], Awaitable[Reply]]
"""A function that maps the body of a request to the response: one object, or a stream of objects."""
DONE = b"data: [DONE]\n\n"
"""The last event of a stream, in OpenAI's interface."""

_FULL_RETRY_S = 5.0
_STOPPED_RETRY_S = 10.0

_log = logging.getLogger("veilbase.endpoint")


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def log_request(method: str, route: str, status: int, code: str, seconds: float) -> None:
    """Writes the line about one request.

    Args:
        method: the request's method; one that clients made up is not shown.
        route: a fixed name of the route, and never the path, which clients may fill with anything; "-" for none.
        status: the HTTP status; 0 for a client that left before the response.
        code: a fixed word.
        seconds: the time from the request's head to the end of the response.
    """
    shown = method if method in _METHODS else "-"
    _log.info("%s %s %s %s %.0f ms", shown, route, status or "-", code, 1000 * seconds)


class ClientGone(Exception):
    """Says that the client closed the connection before its response was complete."""


class Ending:
    """Ends the requests that are under way when the server ends. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        """Makes an ending that has not come."""
        self._has_come = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def come(self) -> None:
        """Ends all requests, those included that begin later."""
        self._has_come = True
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context for the work of one request, which ends in the middle when the server ends.

        Raises:
            HttpError: the server ends.
        """
        stopping = HttpError(503, "this server is stopping: try again later", "server_stopping", None, _STOPPED_RETRY_S)
        task = asyncio.current_task()
        if self._has_come:
            raise stopping
        if task is None:
            raise TypeError("expected to be in a task")
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._has_come:
                raise
            task.uncancel()
            raise stopping from None
        finally:
            self._tasks.discard(task)


class JsonRoute:
    """Handles the requests of one route that has a body, or an answer that takes a while."""

    def __init__(self, work: Work, limits: EndpointLimits, held: HeldBodies, ending: Ending) -> None:
        """Keeps the arguments.

        Args:
            work: the function that handles a body.
            limits: the size of a body, and the time in which it must arrive.
            held: counts the bytes of the bodies of all requests.
            ending: ends the requests when the server ends.
        """
        self._work, self._limits, self._held, self._ending = work, limits, held, ending

    async def __call__(self, scope: Scope, receive: Receive, response: Response) -> None:
        """Handles one request.

        Raises:
            ClientGone: the client closed the connection.
            TimeoutError: the body did not arrive in time.
            HttpError: the request is refused.
            VeilbaseError: the engine refused the request, or failed.
        """
        with self._ending.watching(), self._held.hold() as held:
            reading = read_body(scope, receive, self._limits.body_bytes, held)
            body = await asyncio.wait_for(reading, self._limits.body_s)
            await _until_gone(receive, self._answer(body, response))

    async def _answer(self, body: bytes, response: Response) -> None:
        reply = await self._work(body)
        if isinstance(reply, dict):
            await response.json(200, reply)
            return
        async with contextlib.aclosing(reply) as events:  # type: ignore[type-var]
            await response.stream(events)


class Response:
    """Sends one response, and remembers how much of it has been sent."""

    def __init__(self, send: Send) -> None:
        """Makes a response of which nothing has been sent."""
        self._send = send
        self.status = 0

    async def json(self, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Sends a whole response of JSON."""
        await self.whole(status, to_bytes(value), b"application/json", headers)

    async def whole(
        self, status: int, body: bytes, kind: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:  # fmt: skip
        """Sends a whole response."""
        await self._start(status, [(b"content-length", str(len(body)).encode()), *(headers or [])], kind)
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, events: Events) -> None:
        """Sends events as they come. The status is sent with the first event. An error before that event can thus still
        have a status of its own."""
        async for event in events:
            if not self.status:
                await self._start(200, [(b"x-accel-buffering", b"no")], b"text/event-stream; charset=utf-8")
            await self._event(b"data: " + to_bytes(event) + b"\n\n")
        await self._event(DONE, is_last=True)

    async def fail(self, error: HttpError) -> str:
        """Sends an error and returns its code. The error is the whole response, or the last event of a stream that has
        begun."""
        with contextlib.suppress(OSError, RuntimeError):  # the client may have gone too
            if not self.status:
                await self.json(error.status, error.body(), error.headers())
            else:
                await self._event(b"data: " + to_bytes(error.body()) + b"\n\n", is_last=True)
        return error.code

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]], kind: bytes) -> None:
        self.status = status
        fixed = [(b"content-type", kind), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})

    async def _event(self, data: bytes, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


class HeldBodies:
    """Counts the bytes of the bodies that are in memory. Only the event loop's thread uses it."""

    def __init__(self, most_bytes: int) -> None:
        """Makes a count of 0. Args: most_bytes: the most bytes of all bodies together."""
        self._most_bytes, self._num_bytes = most_bytes, 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that adds a number of bytes of one body to the count. It raises HttpError if the count
        would exceed the limit. At the end of the `with` block, the bytes of this body are subtracted again."""
        own = 0

        def add(num_bytes: int) -> None:
            nonlocal own
            if self._num_bytes + num_bytes > self._most_bytes:
                raise HttpError(429, "too many large requests are under way", "too_many_requests", None, _FULL_RETRY_S)
            self._num_bytes += num_bytes
            own += num_bytes

        try:
            yield add
        finally:
            self._num_bytes -= own


async def read_body(scope: Scope, receive: Receive, most_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Returns the body of a request. Calls `hold` with the number of bytes of each part that arrives.

    Raises:
        HttpError: the body is larger than the limit, by its header or by the bytes that were received, or `hold`
            refuses it.
        ClientGone: the client closed the connection before the end of the body.
    """
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    too_large = HttpError(413, f"the body is larger than {most_bytes} bytes", "body_too_large")
    if announced.isdigit() and int(announced[:20]) > most_bytes:
        raise too_large
    body = bytearray()  # a list of parts could take fifty times the bytes, if they come one by one
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        hold(len(part))
        if len(body) + len(part) > most_bytes:
            raise too_large
        body += part
        if not message.get("more_body", False):
            return bytes(body)


async def _until_gone(receive: Receive, work: Any) -> None:
    """Runs the work of a request until the work is done, and cancels the work if the client goes away.

    Raises:
        ClientGone: the client went away.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


_MOST_PARTS, _MOST_HEADER_BYTES = 16, 4096
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Part:
    """Holds one field of a form: its value, and the file name that the client gave, or None."""

    data: bytes = field(repr=False)
    filename: str | None


def read_form(content_type: str, body: bytes) -> dict[str, Part]:
    """Returns the fields of a form by name.

    Args:
        content_type: the request's header, which names the boundary between the fields.
        body: the request's body.

    Raises:
        HttpError: the body is not a form of this kind, or it has a field twice, or more than 16 fields.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise _unreadable()
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    if not body.startswith(mark):
        raise _unreadable()
    parts: dict[str, Part] = {}
    place = len(mark)
    while not body.startswith(b"--", place):
        if not body.startswith(b"\r\n", place) or len(parts) == _MOST_PARTS:
            raise _unreadable()
        begin = body.find(b"\r\n\r\n", place, place + _MOST_HEADER_BYTES)
        end = body.find(b"\r\n" + mark, begin + 2)
        if begin < 0 or end < 0:
            raise _unreadable()
        name, filename = _named(body[place + 2 : begin])
        if name in parts:
            raise _unreadable()
        parts[name] = Part(body[begin + 4 : end], filename)
        place = end + 2 + len(mark)
    return parts


def _named(head: bytes) -> tuple[str, str | None]:
    """Returns the name of a field, and the name of its file or None, from the field's header lines.

    Raises:
        HttpError: the field has no name, or its contents are encoded.
    """
    pairs = (line.partition(":") for line in head.decode("utf-8", "replace").split("\r\n"))
    lines = {name.lower(): value for name, _, value in pairs}
    if lines.get("content-transfer-encoding", "binary").strip().lower() not in ("binary", "8bit", "7bit"):
        raise _unreadable()
    given = dict(_PARAMETER.findall(lines.get("content-disposition", "")))
    if "name" not in given:
        raise _unreadable()
    return given["name"], given.get("filename")


def _unreadable() -> HttpError:
    return bad_request("a form with the fields file and purpose was expected", "file", "invalid_form")
