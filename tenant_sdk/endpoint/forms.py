"""This module reads forms with a file (multipart/form-data, RFC 7578), as clients send them to `/v1/files`.

Guarantees: the time is proportional to the size of the body, whatever it holds, and nothing of it is decoded besides a
few header lines. The standard library's parser for e-mail, which can also read forms, guarantees neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tenant_sdk.endpoint.errors import HttpError, bad_request

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
