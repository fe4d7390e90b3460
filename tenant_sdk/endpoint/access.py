"""This module checks the headers of every request, before any route handles it: host, origin, key and content type.

Guarantees: a web page of another origin gets nothing and starts nothing, even if its host name was bound to this
machine's address (DNS rebinding). Keys are compared in constant time. A request whose end is unclear is refused, and
its connection ends. Of a request that is refused here, the body is not read, and only a status and a fixed word are
logged.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping

from starlette.types import Scope

from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.settings import EndpointSettings

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
