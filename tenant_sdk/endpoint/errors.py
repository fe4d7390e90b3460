"""This module turns failures into HTTP responses of OpenAI's form. It also writes files for requests, and says what
happens if the endpoint cannot write to its disk, for example because the disk is full: what was written is removed, and
the request fails with status 507 (`storing`).

Guarantees: each response has one line that says what was expected. No response shows a traceback, a key, or the text of
an exception that is not one of wire/errors.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from noise.disk.private_files import FILE_MODE
from tenant_sdk.text.template import TemplateRefuses
from wire.errors import (
    AccessError,
    ConfigurationError,
    QuotaExceeded,
    RequestError,
    TransportError,
    VeilbaseError,
    VerificationFailed,
)

LOST_RETRY_S = 5.0
"""The seconds after which a client is told to try again if the connection to the provider is lost."""
_KIND_OF_STATUS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    421: "permission_error", 429: "rate_limit_error",
}  # fmt: skip


class HttpError(Exception):
    """Says that a request is refused or has failed. The response gets a status, and an error in OpenAI's form."""

    def __init__(
        self, status: int, text: str, code: str, param: str | None = None, retry_s: float | None = None,
        closes: bool = False,
    ) -> None:  # fmt: skip
        """Makes the error.

        Args:
            status: the HTTP status.
            text: one line for the client, without contents of other requests.
            code: a fixed word for programs and for the log.
            param: the field of the request that is wrong; None if the error is not about a field.
            retry_s: the seconds after which the same request may succeed; None if this is not known.
            closes: whether the connection ends after the response, since it is not certain where the next request
                begins.
        """
        super().__init__(code)  # A log that shows this exception shows its code only.
        self.status, self.text, self.code, self.param, self.retry_s = status, text, code, param, retry_s
        self.closes = closes

    def body(self) -> dict[str, Any]:
        """Returns the error as an object of OpenAI's interface."""
        kind = _KIND_OF_STATUS.get(self.status, "server_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the response's headers for this error, besides content type and length."""
        found = []
        if self.retry_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_s))).encode()))
        if self.closes:
            found.append((b"connection", b"close"))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def bad_request(text: str, param: str | None = None, code: str = "invalid_value") -> HttpError:
    """Returns the error for a request that can never succeed, with status 400."""
    return HttpError(400, text, code, param)


def of_failure(exc: VeilbaseError, busy_s: float) -> HttpError:
    """Returns the HTTP error for an error of this project.

    Args:
        exc: the error that `Engine.submit` raised, or that ended an answer.
        busy_s: if the engine is full, the seconds after which it is expected to take another request.
    """
    if isinstance(exc, QuotaExceeded):
        return HttpError(429, str(exc), "too_many_requests", retry_s=exc.retry_s or busy_s)
    if isinstance(exc, TemplateRefuses):
        return bad_request(str(exc), "messages")
    if isinstance(exc, ConfigurationError):
        return bad_request(str(exc))
    if isinstance(exc, TransportError):
        return HttpError(503, "the connection to the provider is lost: try again", "provider_lost", None, LOST_RETRY_S)
    if isinstance(exc, VerificationFailed):
        return HttpError(502, "a reply of the provider failed its check: this server has ended", "reply_forged")
    if isinstance(exc, AccessError | RequestError):
        return HttpError(502, str(exc), "provider_refused")
    return HttpError(500, str(exc), "engine_failed")


def to_bytes(value: Any) -> bytes:
    """Returns a value as JSON in UTF-8. Half of a surrogate pair, which UTF-8 cannot encode, is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


@contextlib.contextmanager
def storing(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Runs code that writes files for a request. If anything in it fails, `undo` removes what was written.

    Raises:
        HttpError: a file cannot be written; the status is 507.
    """
    try:
        yield
    except OSError as exc:
        undo()
        raise HttpError(507, f"the server cannot store this: {exc.strerror}", "not_stored") from None
    except BaseException:
        undo()
        raise


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link to a file, or a copy with mode 0600 if no link can be made. The file must not change
    afterwards, since a link shares its contents.

    Raises:
        OSError: neither is possible.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        target.chmod(FILE_MODE)
