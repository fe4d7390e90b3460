"""Records the requests that a provider gets and its replies, for security evaluation (docs/operations.md, "Recording").

Guarantees: manifest.json describes the served model. index.jsonl has one line per request to a recorded layer group,
numbered by `seq`, in the order in which requests got a reply, failed or were cancelled. Requests that are refused
before they are queued, for example because they are malformed or over quota, are left out. Tensors are written up to
the size limit; from the first request beyond the limit on, each line of the index says that its tensors are missing. A
full disk ends the recording, but not the serving. end.json is written at the end; it holds the number of lines, and
whether the recording failed. If end.json is missing, the recording was cut off or is still going on.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import threading
from pathlib import Path

import torch
from safetensors.torch import save

from wire.errors import ConfigurationError
from wire.frame import Call
from wire.manifest import GroupInfo, Manifest
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

DEFAULT_LIMIT_BYTES = 4 << 30
_LOGGER = logging.getLogger(__name__)


class Recorder:
    """Writes requests and replies to a recording in one folder."""

    def __init__(
        self, folder: Path, manifest: Manifest, limit_bytes: int = DEFAULT_LIMIT_BYTES, patterns: str = ""
    ) -> None:
        """Begins a recording, and logs a warning that says so.

        Args:
            folder: the folder of the recording, created if it does not exist; it must hold no other recording.
            manifest: the served model's manifest, which is written beside the index.
            limit_bytes: the limit on the total size of all tensor files, in bytes.
            patterns: comma-separated fnmatch patterns for the names of the groups or layers to record; an empty text
                records all groups.

        Raises:
            ConfigurationError: no layer matches, the folder holds a recording, or the folder cannot be written.
        """
        self._folder, self._limit_bytes = folder, limit_bytes
        self._groups = {group.id for group in manifest.groups if _wanted(group, patterns)}
        if not self._groups:
            raise ConfigurationError(f"--record-layers {patterns!r} matches no layer")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index = (folder / "index.jsonl").open("x", encoding="utf-8")
            with (folder / "manifest.json").open("wb") as file:
                file.write(manifest.to_bytes())
        except FileExistsError as exc:
            raise ConfigurationError(f"{folder} holds a recording already: choose another --record") from exc
        except OSError as exc:
            raise ConfigurationError(f"cannot record to {folder}: {exc.strerror}") from exc
        self._lock = threading.Lock()
        self._seq = self._written_bytes = 0
        self._failed = self._is_full = False
        _LOGGER.warning(
            "RECORDING: everything tenants send is written to %s (up to %d bytes). This is for security evaluation; "
            "the manifest tells every tenant.", folder, limit_bytes,
        )  # fmt: skip

    def record(self, tenant: str, call: Call, request: Rows, reply: torch.Tensor | None) -> None:
        """Writes one request and its reply; several threads may call this at once. Does nothing if the request's layer
        group is not recorded, or once a write has failed or the recording has ended.

        Args:
            tenant: the tenant's name.
            call: the request's layer group, direction, arithmetic and purpose.
            request: the request's rows, or the seed from which the provider expands the rows. If it is a seed, the 48
                bytes of the request's payload are written, as uint8.
            reply: the reply; None if the request failed or was cancelled.
        """
        if call.group not in self._groups or self._failed:
            return
        with self._lock:
            line = {
                "seq": self._seq,
                "tenant": tenant,
                "layer": call.group,
                "direction": call.direction.name.lower(),
                "arithmetic": call.arithmetic.name.lower(),
                "purpose": call.purpose.name.lower(),
                "bits": call.bits,
                "reply_bits": call.reply_bits,
                "rows": count_rows(request) if reply is None else reply.shape[0],
                "answered": reply is not None,
            }
            try:
                line["file"] = self._write_tensors(_as_tensor(request), reply)
                line["truncated"] = line["file"] is None
                self._index.write(json.dumps(line) + "\n")
                self._index.flush()
                self._seq += 1
            except (OSError, ValueError) as exc:
                self._failed = True
                _LOGGER.error("the recording ends here: %s", getattr(exc, "strerror", None) or type(exc).__name__)

    def _write_tensors(self, request: torch.Tensor, reply: torch.Tensor | None) -> str | None:
        if self._is_full:
            return None
        tensors = {"request": request} if reply is None else {"request": request, "reply": reply}
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        if self._written_bytes + len(data) > self._limit_bytes:
            self._is_full = True
            return None
        name = f"{self._seq:08d}.safetensors"
        (self._folder / name).write_bytes(data)
        self._written_bytes += len(data)
        return name

    def close(self) -> None:
        """Ends the recording and writes end.json; does nothing if the recording has ended before."""
        with self._lock:
            if self._index.closed:
                return
            end = {"messages": self._seq, "failed": self._failed}
            self._failed = True
            self._index.close()
            try:
                (self._folder / "end.json").write_text(json.dumps(end) + "\n", encoding="utf-8")
            except OSError as exc:
                _LOGGER.error("the end of the recording cannot be written: %s", exc.strerror)


def _as_tensor(request: Rows) -> torch.Tensor:
    if isinstance(request, SeededRows):
        return torch.frombuffer(bytearray(request.pack()), dtype=torch.uint8)
    return request


def _wanted(group: GroupInfo, patterns: str) -> bool:
    parts = [part.strip() for part in patterns.split(",") if part.strip()] or ["*"]
    names = [group.name, *(layer.name for layer in group.layers)]
    return any(fnmatch.fnmatchcase(name, part) for name in names for part in parts)
