"""This module serves the page at `/`: three files of this package, without any outside resource.

Guarantees: the content security policy allows scripts, styles and requests of this server only. The files
contain no key and nothing of users' requests, so no key is needed to read them.
"""

from __future__ import annotations

from importlib import resources

from starlette.types import Receive, Scope, Send

from tenant_sdk.endpoint.http import Response

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
    """Handles GET requests for the page's files, as an ASGI application."""

    def __init__(self) -> None:
        """Reads the files."""
        folder = resources.files("tenant_sdk.endpoint") / "page"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def __contains__(self, path: str) -> bool:
        """Returns whether a path is one of the page's files."""
        return path in self._files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        body, kind = self._files[scope["path"]]
        await Response(send).whole(200, body, kind + b"; charset=utf-8", _HEADERS)
