"""This module keeps uploaded training files (`/v1/files`) in a private folder of the endpoint.

Guarantees: a file is kept only if every line of it is a valid training row. It is stored under a random name; the name
that the client gave is remembered, but never used as a path. Folders have mode 0700 and files 0600.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.training.dataset import load_rows
from wire.errors import DatasetError

MOST_FILES = 256
"""The most files that are kept at a time."""
_ID = re.compile(r"file-[0-9a-f]{24}")


class Uploads:
    """Holds the training files of one endpoint."""

    def __init__(self, folder: Path) -> None:
        """Uses `folder`, which is made when the first file is uploaded."""
        self._folder = folder
        self._lock = threading.Lock()

    def add(self, content_type: str, body: bytes) -> dict[str, Any]:
        """Stores the file of a multipart/form-data body, and returns the file's description.

        Raises:
            HttpError: there is no file, its purpose is not `fine-tune`, or a line of it is not a valid training row.
        """
        name, purpose, data = _parts(content_type, body)
        if purpose != "fine-tune":
            raise bad_request("the purpose fine-tune was expected", "purpose")
        with self._lock:
            if len(self._all()) >= MOST_FILES:
                raise HttpError(429, f"{MOST_FILES} files are kept already: delete some", "too_many_files")
            file_id = f"file-{secrets.token_hex(12)}"
            make_private_folder(self._folder)
            path = self._folder / f"{file_id}.jsonl"
            try:
                write_private(path, data.decode())
                load_rows(path)
            except UnicodeDecodeError:
                raise bad_request("the file is not text in UTF-8", "file", "invalid_file") from None
            except DatasetError as exc:  # names the line, and shows nothing of it
                path.unlink(missing_ok=True)
                raise bad_request(str(exc).replace(str(path), "the file"), "file", "invalid_file") from None
            described = {
                "id": file_id, "object": "file", "bytes": len(data), "created_at": int(time.time()),
                "filename": name, "purpose": purpose, "status": "processed",
            }  # fmt: skip
            write_private(self._folder / f"{file_id}.json", json.dumps(described))
        return described

    def path(self, file_id: str) -> Path:
        """Returns the path at which a file is stored.

        Raises:
            HttpError: there is no such file.
        """
        self.get(file_id)
        return self._folder / f"{file_id}.jsonl"

    def get(self, file_id: str) -> dict[str, Any]:
        """Returns a file's description. Raises: see `path`."""
        path = self._folder / f"{file_id}.json"
        if _ID.fullmatch(file_id) is None or not path.is_file():
            raise HttpError(404, "there is no such file here", "not_found")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def listed(self) -> dict[str, Any]:
        """Returns all files, the newest first."""
        found = sorted((self.get(each) for each in self._all()), key=lambda each: -each["created_at"])
        return {"object": "list", "data": found, "has_more": False}

    def delete(self, file_id: str) -> dict[str, Any]:
        """Deletes a file; a job that has begun has its own copy. Raises: see `path`."""
        self.get(file_id)
        for ending in ("jsonl", "json"):
            (self._folder / f"{file_id}.{ending}").unlink(missing_ok=True)
        return {"id": file_id, "object": "file", "deleted": True}

    def _all(self) -> list[str]:
        return [path.stem for path in self._folder.glob("file-*.json") if _ID.fullmatch(path.stem)]


def _parts(content_type: str, body: bytes) -> tuple[str, str, bytes]:
    """Returns (file name, purpose, the file's bytes) of a multipart body."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    try:
        message = BytesParser(policy=HTTP).parsebytes(head + body)
        parts = {
            str(part.get_param("name", header="content-disposition")): part
            for part in (message.iter_parts() if message.is_multipart() else ())  # type: ignore[attr-defined]
        }
        file, purpose = parts.get("file"), parts.get("purpose")
        if file is None or purpose is None or file.is_multipart():
            raise bad_request("a form with the fields file and purpose was expected", "file", "invalid_form")
        data: Any = file.get_payload(decode=True)
        return str(file.get_filename() or "upload.jsonl")[:256], purpose.get_content().strip(), data
    except HttpError:
        raise
    except Exception:  # noqa: BLE001 - the parser of the standard library raises anything on damaged forms
        raise bad_request("the form cannot be read", "file", "invalid_form") from None
