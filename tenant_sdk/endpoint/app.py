"""This module combines all routes of the endpoint into one ASGI application, which serves one engine.

Every request first passes `Access`, which checks its headers before any route handles it: host, origin, key and content
type. The page at `/` (`PageFiles`) is three files of this package, without any outside resource.

Guarantees:
- a web page of another origin gets nothing and starts nothing, even if its host name was bound to this machine's
  address (DNS rebinding);
- keys are compared in constant time;
- a request whose end is unclear is refused, and its connection ends;
- of a request that the checks refuse, the body is not read;
- every request has one line in the log, refusals too: the method, the route, the status, a code and the duration.
  Nothing in it is a client's: the route is one of a few names. Those that are refused, or go to a route for programs,
  are counted once in the metrics;
- for an unknown path or method, the response is an error in OpenAI's form;
- the page's content security policy allows scripts, styles and requests of this server only. Its files contain no key
  and nothing of users' requests, so no key is needed to read them.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import ipaddress
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from tenant_sdk.endpoint.chat import Chat
from tenant_sdk.endpoint.completions import Completions
from tenant_sdk.endpoint.embeddings import Embeddings
from tenant_sdk.endpoint.errors import HttpError, of_failure
from tenant_sdk.endpoint.http import ClientGone, Ending, HeldBodies, JsonRoute, Reply, Response, Work, log_request
from tenant_sdk.endpoint.jobs import JobRoutes
from tenant_sdk.endpoint.schema import LoadAdapter, UnloadAdapter, parsed
from tenant_sdk.endpoint.service import CONTENT_TYPE, Service, in_thread
from tenant_sdk.endpoint.settings import EndpointLimits, EndpointSettings
from wire.errors import VeilbaseError

_FILES = {
    "/": ("page.html", b"text/html"),
    "/page.js": ("page.js", b"text/javascript"),
    "/page.css": ("page.css", b"text/css"),
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY), (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"), (b"cross-origin-resource-policy", b"same-origin"),
]  # fmt: skip


class PageFiles:
    """Handles GET requests for the page's files."""

    def __init__(self) -> None:
        """Reads the files."""
        folder = resources.files("tenant_sdk.endpoint") / "page"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def __contains__(self, path: str) -> bool:
        return path in self._files

    async def answer(self, path: str, response: Response) -> None:
        """Sends one of the files."""
        body, kind = self._files[path]
        await response.whole(200, body, kind + b"; charset=utf-8", _HEADERS)


OPEN_PATHS = frozenset({"/", "/page.js", "/page.css", "/health"})
"""The paths that need no key: they hold no contents, and a browser opens the page without a header."""
UPLOAD_PATH = "/v1/files"
"""The path that accepts a form with a file. A form of another site is refused, since its origin differs and it has no
key."""
_TYPE = "application/json"


class Access:
    """Checks the headers of requests."""

    def __init__(self, settings: EndpointSettings) -> None:
        """Keeps a digest of the key, and whether only loopback names are accepted in the Host header."""
        self._only_loopback = settings.is_loopback
        self._key_digest = _digest(settings.key)

    def check(self, scope: Scope) -> None:
        """Checks the headers of one request.

        Raises:
            HttpError: the request is refused.
        """
        headers = _single_headers(scope)
        _check_framing(scope)
        host = headers.get("host", "")
        if self._only_loopback and not _is_own_host(host):
            raise HttpError(421, "this server answers to localhost and 127.0.0.1 only", "wrong_host")
        self._check_origin(scope, headers, host)
        if scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return
        self._check_key(headers.get("authorization", ""))
        has_none = "content-type" not in headers and scope["path"].startswith("/v1/fine_tuning/")  # cancel, resume
        if scope["method"] == "POST" and not has_none:
            _check_type(headers.get("content-type", ""), is_upload=scope["path"] == UPLOAD_PATH)

    def _check_origin(self, scope: Scope, headers: Mapping[str, str], host: str) -> None:
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower()
        # Browsers that send no Origin with a GET say by this header whether another site makes the request.
        if is_foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise HttpError(403, "requests of pages from another origin are refused", "wrong_origin")

    def _check_key(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        is_right = hmac.compare_digest(_digest(key.strip()), self._key_digest)
        if scheme.lower() != "bearer" or not is_right:
            raise HttpError(401, "expected this server's key as `Authorization: Bearer KEY`", "invalid_api_key")


def _digest(key: str) -> bytes:
    """Returns the SHA-256 of a key. Comparing digests takes the same time for keys of any length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _single_headers(scope: Scope) -> dict[str, str]:
    """Returns the headers that `Access.check` needs. Refuses a request that has one of them twice, since two programs
    could then read the request differently.

    Raises:
        HttpError: a header came twice.
    """
    found: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        if name in ("host", "origin", "authorization", "content-type", "sec-fetch-site"):
            if name in found:
                raise HttpError(400, f"the header {name} came twice", "invalid_header")
            found[name] = raw_value.decode("latin-1")
    return found


def _check_framing(scope: Scope) -> None:
    """Refuses a request whose end a proxy before this server may see at another place (request smuggling).

    Source: RFC 9112, section 6.1, for both cases.
    """
    names = {name.lower() for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise _unclear("expected either Content-Length or Transfer-Encoding, and both came")
    if scope["http_version"] == "1.0":
        raise _unclear("expected Content-Length: HTTP/1.0 has no Transfer-Encoding")


def _unclear(text: str) -> HttpError:
    return HttpError(400, text, "invalid_framing", closes=True)


def _is_own_host(host: str) -> bool:
    """Returns whether a Host header is localhost or a loopback address, with any port."""
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "0")
    if not name:
        name, port = host, "0"
    if not (port.isascii() and port.isdigit()):
        return False
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name).is_loopback
    except ValueError:
        return False


def _check_type(content_type: str, is_upload: bool) -> None:
    """Refuses a content type other than JSON, or for an upload other than multipart/form-data.

    A browser sends JSON to another site only if that site allows it.
    """
    wanted = "multipart/form-data" if is_upload else _TYPE
    if content_type.partition(";")[0].strip().lower() != wanted:
        raise HttpError(415, f"expected the type {wanted}", "invalid_content_type")


_OF_JOBS = ("/v1/files", "/v1/fine_tuning/")
_OF_MODELS = "/v1/models/"
_JOB_PATHS = ("/v1/files", "/v1/fine_tuning/jobs")
_MOST_OF_A_PATH, _NEARLY = 64, 0.8
"""How much of an unknown path is compared with the known ones, and how similar (difflib's ratio) one must be."""
Plain = Callable[[Response], Awaitable[None]]
"""A function that sends the response to a request without a body."""


class App:
    """Handles all requests, as an ASGI application."""

    def __init__(self, service: Service, jobs: JobRoutes | None = None) -> None:
        """Makes the routes. Args: jobs: the routes of files and jobs; None if there is no folder of adapters."""
        self._service = service
        self._access = Access(service.settings)
        self._held = HeldBodies(service.settings.limits.held_bytes)
        self.ending = Ending()
        """Ends the requests under way when the server ends."""
        self._routes: dict[tuple[str, str], JsonRoute] = {}
        self._post("/v1/chat/completions", Chat(service))
        self._post("/v1/completions", Completions(service))
        self._post("/v1/embeddings", Embeddings(service))
        self._post("/v1/load_lora_adapter", self._load)
        self._post("/v1/unload_lora_adapter", self._unload)
        self._get("/v1/models", lambda: service.names.listed())
        self._get("/v1/status", service.status)
        self._page = PageFiles()
        self._jobs = jobs

    def _post(self, path: str, work: Work) -> None:
        self._routes["POST", path] = self._json_route(work)

    def _json_route(self, work: Work, limits: EndpointLimits | None = None) -> JsonRoute:
        return JsonRoute(work, limits or self._service.settings.limits, self._held, self.ending)

    def _get(self, path: str, read: Callable[[], dict[str, Any]]) -> None:
        self._routes["GET", path] = self._getting(read)

    def _getting(self, read: Callable[[], dict[str, Any]]) -> JsonRoute:
        async def work(_: bytes) -> Reply:
            return await in_thread(read)

        return self._json_route(work)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request. The server, which has no lifespan events, sends nothing else."""
        began, response, code = time.monotonic(), Response(send), "ok"
        name, counted = self._name_of(scope["path"]), "refused"
        try:
            self._access.check(scope)
            route = self._route(scope["method"], scope["path"], scope)
            if isinstance(route, JsonRoute):
                counted = name
                await route(scope, receive, response)
            else:
                await route(response)
        except ClientGone:
            code = "client_gone"
        except TimeoutError:
            code = await response.fail(HttpError(408, "the request did not arrive in time", "request_timeout"))
        except HttpError as exc:
            code = await response.fail(exc)
        except VeilbaseError as exc:
            code = await response.fail(of_failure(exc, self._service.metrics.busy_s()))
        except Exception as exc:  # noqa: BLE001 - its text may show contents, so that only its type is named
            code = await response.fail(HttpError(500, "this server failed", f"internal_{type(exc).__name__}"))
        seconds = time.monotonic() - began
        if code != "ok" or counted == name:  # the page, its health and its metrics are not counted
            self._service.metrics.count_request(counted, response.status, seconds)
        log_request(scope["method"], name, response.status, code, seconds)

    def _name_of(self, path: str) -> str:
        """Returns the name of the route of a path, for the log and the metrics: "-" if no route has this path."""
        if path in ("/metrics", "/health") or path in self._page or any(path == known for _, known in self._routes):
            return path
        if path.startswith(_OF_MODELS):
            return "/v1/models/NAME"
        if path.startswith(_OF_JOBS):
            return UPLOAD_PATH if path.startswith(UPLOAD_PATH) else "/v1/fine_tuning/jobs"
        return "-"

    def _route(self, method: str, path: str, scope: Scope) -> JsonRoute | Plain:
        method = "GET" if method == "HEAD" else method
        if path == "/metrics" and method == "GET":
            return self._metrics
        if path == "/health" and method == "GET":
            return self._health
        if path in self._page and method == "GET":
            return partial(self._page.answer, path)
        if (route := self._routes.get((method, path))) is not None:
            return route
        if method == "GET" and path.startswith(_OF_MODELS):  # the base model's name may hold a slash
            name = path.removeprefix(_OF_MODELS)
            return self._getting(lambda: self._service.names.entry(name))
        if path.startswith(_OF_JOBS) and self._jobs is not None:
            return self._of_jobs(self._jobs, method, path, scope)
        if any(known == path for _, known in self._routes):
            raise HttpError(405, "this path takes another method", "method_not_allowed")
        raise self.no_such_path(path)

    def no_such_path(self, path: str) -> HttpError:
        """Returns the error for an unknown path, with one of similar spelling if there is one."""
        known = ["/health", "/metrics", *(each for _, each in self._routes), *(_JOB_PATHS if self._jobs else ())]
        meant = difflib.get_close_matches(path.lower().rstrip("/")[:_MOST_OF_A_PATH], known, n=1, cutoff=_NEARLY)
        advice = f": did you mean {meant[0]}?" if meant and meant[0] != path else ""
        return HttpError(404, f"there is no such path here{advice}", "not_found")

    def _of_jobs(self, jobs: JobRoutes, method: str, path: str, scope: Scope) -> JsonRoute:
        kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        limits = self._service.settings.limits
        is_upload = path == UPLOAD_PATH

        async def work(body: bytes) -> Reply:
            is_over = threading.Event()
            service = self._service
            threads = service.upload_threads if is_upload and method == "POST" else service.slow_threads
            try:
                asked = method, path, _query(scope), kind, body, is_over.is_set
                found = await in_thread(jobs.answer, *asked, threads=threads)
            finally:  # also when the client has gone, of which the thread would not know otherwise
                is_over.set()
            if found is None:
                raise self.no_such_path(path)
            return found

        limits = replace(limits, body_bytes=limits.file_bytes if is_upload else limits.body_bytes)
        return self._json_route(work, limits)

    async def _health(self, response: Response) -> None:
        state = self._service.health()
        await response.json(200 if state["status"] == "ok" else 503, state)

    async def _metrics(self, response: Response) -> None:
        await response.whole(200, self._service.metrics.text(), CONTENT_TYPE)

    async def _load(self, body: bytes) -> Reply:
        request = parsed(LoadAdapter, body)
        named = request.lora_name, request.lora_path
        await in_thread(self._service.names.load, *named, threads=self._service.slow_threads)
        return {"status": "loaded", "id": request.lora_name}

    async def _unload(self, body: bytes) -> Reply:
        request = parsed(UnloadAdapter, body)
        await in_thread(self._service.names.unload, request.lora_name)
        return {"status": "unloaded", "id": request.lora_name}


def _query(scope: Scope) -> dict[str, str]:
    """Returns the parameters after the question mark of a request's URL; an empty dict if there are more than 16."""
    try:
        return dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=16))
    except ValueError:
        return {}
