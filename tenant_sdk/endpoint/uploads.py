"""This module keeps uploaded training files (`/v1/files`) in a private folder of the endpoint.

Guarantees: a file is kept only if every line of it is a valid training row; nothing is left on disk of any other. If
the process dies while it stores a file, the next start removes the remains. A kept file has a random name; the name
that the client gave is remembered, but never used as a path. Folders have mode 0700 and files 0600.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.disk import storing, write_new
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.forms import read_form
from tenant_sdk.training.dataset import load_rows
from wire.errors import DatasetError

MOST_FILES, MOST_BYTES = 256, 4 << 30
"""The most files that are kept at a time, and the most bytes of them together."""
_ID = re.compile(r"file-[0-9a-f]{24}")


class Uploads:
    """Holds the training files of one endpoint."""

    def __init__(self, folder: Path) -> None:
        """Uses `folder`, which is made when the first file is uploaded. Removes the remains of
        uploads that an earlier process did not complete."""
        self._folder = folder
        self._lock = threading.Lock()
        for path in [*folder.glob("file-*.jsonl"), *folder.glob("file-*.new")]:
            if path.suffix == ".new" or not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def add(self, content_type: str, body: bytes) -> dict[str, Any]:
        """Stores the file of a multipart/form-data body, and returns the file's description.

        Raises:
            HttpError: there is no file, its purpose is not `fine-tune`, a line of it is not a valid training row, too
                much is kept already, or the disk is full.
        """
        form = read_form(content_type, body)
        if "file" not in form or "purpose" not in form:
            raise bad_request("a form with the fields file and purpose was expected", "file", "invalid_form")
        if form["purpose"].data.strip() != b"fine-tune":
            raise bad_request("the purpose fine-tune was expected", "purpose")
        data = form["file"].data
        described: dict[str, Any] = {
            "id": f"file-{secrets.token_hex(12)}", "object": "file", "bytes": len(data),
            "created_at": int(time.time()), "filename": (form["file"].filename or "upload.jsonl")[:256],
            "purpose": "fine-tune", "status": "processed",
        }  # fmt: skip
        with self._lock:
            kept = self._all()
            if len(kept) >= MOST_FILES or len(data) + sum(each["bytes"] for each in kept) > MOST_BYTES:
                raise HttpError(429, f"{len(kept)} files are kept already: delete some", "too_many_files")
            with storing(lambda: self._remove(described["id"])):
                self._store(described, data)
        return described

    def _store(self, described: dict[str, Any], data: bytes) -> None:
        """Checks and stores a file, and last its description, without which the file does not count."""
        make_private_folder(self._folder)
        path = self._folder / f"{described['id']}.jsonl"
        write_new(path, data)
        try:
            load_rows(path)
        except DatasetError as exc:  # names the line, and shows nothing of it
            raise bad_request(str(exc).replace(str(path), "the file"), "file", "invalid_file") from None
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
