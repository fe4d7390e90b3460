"""This module combines all routes into one ASGI application, which serves one engine.

Guarantees: every request first passes the checks of `access.py`. For an unknown path or method, the response is an
error in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Receive, Scope, Send

from tenant_sdk.endpoint.access import UPLOAD_PATH, Access
from tenant_sdk.endpoint.chat import Chat
from tenant_sdk.endpoint.completions import Completions
from tenant_sdk.endpoint.embeddings import Embeddings
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.http import Ending, HeldBodies, JsonRoute, Reply, Response
from tenant_sdk.endpoint.job_routes import JobRoutes
from tenant_sdk.endpoint.metrics import CONTENT_TYPE
from tenant_sdk.endpoint.page_files import PageFiles
from tenant_sdk.endpoint.schema import LoadAdapter, UnloadAdapter, parsed
from tenant_sdk.endpoint.service import Service
from tenant_sdk.endpoint.settings import EndpointLimits

_log = logging.getLogger("veilbase.endpoint")
_OF_JOBS = ("/v1/files", "/v1/fine_tuning/")
_OF_MODELS = "/v1/models/"
T = TypeVar("T")


class App:
    """Handles all requests, as an ASGI application."""

    def __init__(self, service: Service, jobs: JobRoutes | None = None) -> None:
        """Makes the routes. Args: jobs: the routes of files and jobs; None if there is no folder of adapters."""
        self._service = service
        self._access = Access(service.settings)
        self._held = HeldBodies(service.settings.limits.held_bytes)
        self.ending = Ending()
        """Ends the requests under way when the server ends."""
        self._routes: dict[tuple[str, str], ASGIApp] = {}
        self._post("/v1/chat/completions", Chat(service))
        self._post("/v1/completions", Completions(service))
        self._post("/v1/embeddings", Embeddings(service))
        self._post("/v1/load_lora_adapter", self._load)
        self._post("/v1/unload_lora_adapter", self._unload)
        self._get("/v1/models", lambda: service.names.listed())
        self._get("/v1/status", service.status)
        self._page = PageFiles()
        self._jobs = jobs

    def _post(self, path: str, work: Callable[[bytes], Awaitable[Reply]]) -> None:
        self._routes["POST", path] = self._json_route(path, work, self._service.settings.limits)

    def _json_route(self, name: str, work: Callable[[bytes], Awaitable[Reply]], limits: EndpointLimits) -> ASGIApp:
        return JsonRoute(name, work, limits, self._service.metrics, self._held, self.ending)

    def _get(self, path: str, read: Callable[[], dict[str, Any]], name: str | None = None) -> None:
        self._routes["GET", path] = self._getting(name or path, read)

    def _getting(self, name: str, read: Callable[[], dict[str, Any]]) -> ASGIApp:
        async def work(_: bytes) -> Reply:
            return await asyncio.get_running_loop().run_in_executor(None, read)

        return self._json_route(name, work, self._service.settings.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request, or ASGI's messages about the start and end of the server."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        response = Response(send)
        try:
            self._access.check(scope)
            route = self._route(scope["method"], scope["path"], scope)
        except HttpError as exc:
            self._service.metrics.count_request("refused", exc.status, 0.0)
            _log.info("refused %s %s", exc.status, await response.fail(exc))
            return
        await route(scope, receive, send)

    def _route(self, method: str, path: str, scope: Scope) -> ASGIApp:
        method = "GET" if method == "HEAD" else method
        if path == "/metrics" and method == "GET":
            return self._metrics
        if path == "/health" and method == "GET":
            return self._health
        if path in self._page and method == "GET":
            return self._page
        if (route := self._routes.get((method, path))) is not None:
            return route
        if method == "GET" and path.startswith(_OF_MODELS):  # the base model's name may hold a slash
            name = path.removeprefix(_OF_MODELS)
            return self._getting("/v1/models/NAME", lambda: self._service.names.entry(name))
        if path.startswith(_OF_JOBS) and self._jobs is not None:
            return self._of_jobs(self._jobs, method, path, scope)
        if any(known == path for _, known in self._routes):
            raise HttpError(405, "this path takes another method", "method_not_allowed")
        raise HttpError(404, "there is no such path here", "not_found")

    def _of_jobs(self, jobs: JobRoutes, method: str, path: str, scope: Scope) -> ASGIApp:
        kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
        limits = self._service.settings.limits
        is_upload = path == UPLOAD_PATH

        async def work(body: bytes) -> Reply:
            is_over = threading.Event()
            service = self._service
            threads = service.upload_threads if is_upload and method == "POST" else service.slow_threads
            try:
                found = await asyncio.get_running_loop().run_in_executor(
                    threads, jobs.answer, method, path, _query(scope), kind, body, is_over.is_set
                )
            finally:  # also when the client has gone, of which the thread would not know otherwise
                is_over.set()
            if found is None:
                raise HttpError(404, "there is no such path here", "not_found")
            return found

        limits = replace(limits, body_bytes=limits.file_bytes if is_upload else limits.body_bytes)
        return self._json_route(UPLOAD_PATH if is_upload else "/v1/fine_tuning/jobs", work, limits)

    async def _slowly(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs work that may take seconds, such as reading a file or waiting for an adapter, in threads of its own, so
        that other requests do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._service.slow_threads, work, *arguments)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._service.health()
        await Response(send).json(200 if state["status"] == "ok" else 503, state)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(send).whole(200, self._service.metrics.text(), CONTENT_TYPE)

    async def _load(self, body: bytes) -> Reply:
        request = parsed(LoadAdapter, body)
        await self._slowly(self._service.names.load, request.lora_name, request.lora_path)
        return {"status": "loaded", "id": request.lora_name}

    async def _unload(self, body: bytes) -> Reply:
        request = parsed(UnloadAdapter, body)
        await asyncio.get_running_loop().run_in_executor(None, self._service.names.unload, request.lora_name)
        return {"status": "unloaded", "id": request.lora_name}


def _query(scope: Scope) -> dict[str, str]:
    """Returns the parameters after the question mark of a request's URL; an empty dict if there are more than 16."""
    try:
        return dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=16))
    except ValueError:
        return {}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
