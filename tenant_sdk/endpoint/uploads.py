"""This module keeps uploaded training files (`/v1/files`) in a private folder of the endpoint.

Guarantees: a file is kept only if every line of it is a valid training row; nothing is left on disk of any other. Rows
are checked one by one, so that a file takes little more memory than its bytes, and the check ends when the client goes
away; other uploads do not wait for it. If the process dies while it stores a file, the next start removes the remains.
A kept file has a random name; the name that the client gave is remembered, but never used as a path. Folders have mode
0700 and files 0600.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.errors import HttpError, bad_request, storing, write_new
from tenant_sdk.endpoint.http import ClientGone, Part, read_form
from tenant_sdk.endpoint.settings import EndpointLimits
from tenant_sdk.training.dataset import are_preferences, load_rows
from wire.errors import DatasetError

MOST_FILES, MOST_BYTES = 256, 4 << 30
"""The most files that are kept at a time, and the most bytes of them together."""
_ID = re.compile(r"file-[0-9a-f]{24}")


class Uploads:
    """Holds the training files of one endpoint."""

    def __init__(self, folder: Path, limits: EndpointLimits | None = None) -> None:
        """Uses `folder`, which is made when the first file is uploaded. Removes the remains of
        uploads that an earlier process did not complete.

        Args:
            folder: the folder of the files.
            limits: the most rows of a file, and the most bytes of one row.
        """
        self._folder, self._limits = folder, limits or EndpointLimits()
        self._lock = threading.Lock()
        self._arriving: dict[str, int] = {}
        """The sizes of the files that are being checked, by id."""
        for path in [*folder.glob("file-*.jsonl"), *folder.glob("file-*.new")]:
            if path.suffix == ".new" or not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def add(
        self, content_type: str, body: bytes, is_gone: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:  # fmt: skip
        """Stores the file of a multipart/form-data body, and returns the file's description.

        Args:
            content_type: the request's header.
            body: the request's body.
            is_gone: returns whether the client has gone away.

        Raises:
            HttpError: there is no file, its purpose is not `fine-tune`, a field is unknown, a line of it is not a valid
                training row or is too long, too much is kept already, or the disk is full.
            ClientGone: the client went away before the file was checked.
        """
        form = read_form(content_type, body)
        _check_form(form)
        data = form["file"].data
        described: dict[str, Any] = {
            "id": f"file-{secrets.token_hex(12)}", "object": "file", "bytes": len(data),
            "created_at": int(time.time()), "filename": (form["file"].filename or "upload.jsonl")[:256],
            "purpose": "fine-tune", "status": "processed",
        }  # fmt: skip
        self._make_room(described["id"], len(data))
        try:
            with storing(lambda: self._remove(described["id"])):
                _check_rows(data, self._limits, is_gone)
                self._store(described, data)
        finally:
            with self._lock:
                del self._arriving[described["id"]]
        return described

    def _make_room(self, file_id: str, num_bytes: int) -> None:
        """Counts a file that arrives.

        Raises:
            HttpError: too much is kept already, those files included that are being checked.
        """
        with self._lock:
            kept = {each["id"]: each["bytes"] for each in self._all()} | self._arriving
            if len(kept) >= MOST_FILES or num_bytes + sum(kept.values()) > MOST_BYTES:
                raise HttpError(429, f"{len(kept)} files are kept already: delete some", "too_many_files")
            self._arriving[file_id] = num_bytes

    def _store(self, described: dict[str, Any], data: bytes) -> None:
        """Stores a file, and last its description, without which the file does not count."""
        make_private_folder(self._folder)
        path = self._folder / f"{described['id']}.jsonl"
        write_new(path, data)
        write_private(path.with_suffix(".new"), json.dumps(described))
        path.with_suffix(".new").replace(path.with_suffix(".json"))

    def _remove(self, file_id: str) -> None:
        for ending in ("json", "new", "jsonl"):
            (self._folder / f"{file_id}.{ending}").unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Returns the path at which a file is stored.

        Raises:
            HttpError: there is no such file.
        """
        self.get(file_id)
        return self._folder / f"{file_id}.jsonl"

    def get(self, file_id: str) -> dict[str, Any]:
        """Returns a file's description. Raises: see `path`."""
        found = self._described(file_id) if _ID.fullmatch(file_id) else None
        if found is None:
            raise HttpError(404, "there is no such file here", "not_found")
        return found

    def listed(self) -> dict[str, Any]:
        """Returns all files, the newest first."""
        found = sorted(self._all(), key=lambda each: -each["created_at"])
        return {"object": "list", "data": found, "has_more": False}

    def delete(self, file_id: str) -> dict[str, Any]:
        """Deletes a file; a job that has begun keeps it. Raises: see `path`."""
        self.get(file_id)
        self._remove(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    def _all(self) -> list[dict[str, Any]]:
        ids = [path.stem for path in self._folder.glob("file-*.json") if _ID.fullmatch(path.stem)]
        return [found for found in map(self._described, ids) if found is not None]

    def _described(self, file_id: str) -> dict[str, Any] | None:
        """Returns a file's description; None if there is none, or it is damaged."""
        try:
            found: dict[str, Any] = json.loads((self._folder / f"{file_id}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found


def _check_form(form: dict[str, Part]) -> None:
    """Checks that a form has a file, the purpose `fine-tune`, and nothing else that says something.

    Raises:
        HttpError: it is another form.
    """
    if "file" not in form or "purpose" not in form:
        raise bad_request("a form with the fields file and purpose was expected", "file", "invalid_form")
    if form["purpose"].data.strip() != b"fine-tune":
        raise bad_request("the purpose fine-tune was expected", "purpose")
    other = next((name for name, part in form.items() if name not in ("file", "purpose") and part.data.strip()), None)
    if other is not None:
        place = ascii(other)[1:-1][:64]
        raise bad_request(f"{place} is not supported here: leave it out", place, "unknown_field")


def _check_rows(data: bytes, limits: EndpointLimits, is_gone: Callable[[], bool]) -> None:
    """Checks the rows of a JSONL file, of which one at a time is in memory.

    Raises:
        HttpError: a line is not a valid row; the text names the line, and shows nothing of it.
        ClientGone: the client went away.
    """
    _check_sizes(data, limits)
    of_preferences: bool | None = None
    for number, line in enumerate(io.BytesIO(data), start=1):
        if is_gone():
            raise ClientGone
        where = f"the file, line {number}"
        value = _value(where, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
        if value is None:
            continue
        try:
            row = load_rows([value])
        except DatasetError as exc:  # its text begins with the place among the rows that it was given
            raise _invalid(f"{where}: {str(exc).partition(': ')[2]}") from None
        if of_preferences is None:
            of_preferences = are_preferences(row)
        if are_preferences(row) is not of_preferences:
            raise _invalid(f"{where}: expected chosen and rejected in all rows or in none")
    if of_preferences is None:
        raise _invalid("the file: expected at least one row, none came")


def _check_sizes(data: bytes, limits: EndpointLimits) -> None:
    """Checks the number of lines and the length of each, before any of them is read.

    Raises:
        HttpError: there are too many lines, or one is too long.
    """
    num_lines = data.count(b"\n") + 1
    if num_lines > limits.file_rows:
        raise _invalid(f"the file: expected at most {limits.file_rows} lines, {num_lines} came: upload several files")
    begin = 0
    while len(data) - begin > limits.row_bytes:
        end = data.rfind(b"\n", begin, begin + limits.row_bytes + 1)
        if end < 0:
            number = data.count(b"\n", 0, begin) + 1
            raise _invalid(f"the file, line {number}: expected at most {limits.row_bytes} bytes a line")
        begin = end + 1


def _value(where: str, line: bytes) -> Any:
    """Returns the JSON value of a line; None for a blank line.

    Raises:
        HttpError: the line is something else.
    """
    try:
        text = line.decode()
        value = json.loads(text) if text.strip() else None
    except UnicodeDecodeError as exc:
        raise _invalid(f"{where}: expected UTF-8; byte {exc.start + 1} of the line is not") from None
    except json.JSONDecodeError as exc:
        raise _invalid(f"{where}: expected one JSON object per line; invalid JSON at column {exc.colno}") from None
    except (RecursionError, ValueError):  # nesting or digits exceed the interpreter's limits
        raise _invalid(f"{where}: invalid JSON: nested too deeply or a number too long") from None
    if value is None and text.strip():
        raise _invalid(f"{where}: expected an object, null came")
    return value


def _invalid(text: str) -> HttpError:
    return bad_request(text, "file", "invalid_file")
