"""Reads and checks a recording made by `provider serve --record`, which holds what one provider sees.

A view holds the manifest and the recorded bytes, and nothing that only the tenant knows. A recording that is empty or
damaged is refused with a `ConfigurationError`. Tensors are read only when a method needs them, so a damaged tensor is
noticed only then. If the recorder reached its size limit, later messages have no tensors, and `is_truncated` is True.
If the recorder did not end properly, `is_ended` is False.

`write_recording` makes such a recording from given tensors, for controls and tests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attacks.seen.recording import END_NAME, INDEX_NAME, MANIFEST_NAME, damaged, no_recording
from wire.errors import ConfigurationError, VeilbaseError
from wire.manifest import Manifest, parse_manifest
from wire.ring.seeded_rows import PACKED_BYTES, SeededRows
from wire.ring.widths import FULL_BITS


class _End(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    messages: int = Field(ge=0)
    failed: bool


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    seq: int = Field(ge=0)
    tenant: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")  # the provider's own rule; names go into file names
    layer: int
    direction: Literal["forward", "backward"]
    arithmetic: Literal["ring", "float"]
    purpose: Literal["product", "hint", "effect"]
    bits: int = Field(default=FULL_BITS, ge=1, le=FULL_BITS)
    rows: int = Field(ge=0)
    file: str | None = Field(pattern=r"^[0-9]{8,20}\.safetensors$")
    truncated: bool = False
    answered: bool = True


@dataclass(frozen=True)
class Message:
    """Holds one request and its reply.

    Attributes:
        seq: the message's number in the recording, from 0, in the order in which requests got a reply or ended without
            one.
        group: the group's id in the manifest.
        num_rows: the number of tokens; for a hint, the number of rows of the public matrix.
        widths: the numbers of columns of the request and of the reply, according to the manifest.
        file: the file that holds the tensors; None if the recorder had no room left.
        bits: how many bits each number of a ring request had on the wire; the lower ones of its int32 are zero.
    """

    seq: int
    tenant: str
    group: int
    direction: Literal["forward", "backward"]
    arithmetic: Literal["ring", "float"]
    purpose: Literal["product", "hint", "effect"]
    num_rows: int
    file: Path | None = field(repr=False)
    widths: tuple[int, int] = field(repr=False)
    bits: int = FULL_BITS

    def request(self) -> torch.Tensor:
        """Returns what the provider received: int32 or float32, shape (num_rows, features); for a hint its 48-byte
        payload, uint8.

        Raises:
            ConfigurationError: the tensors were not recorded, or are damaged.
        """
        if self.purpose == "hint":
            return self._read("request", (PACKED_BYTES,), torch.uint8)
        rows = self.num_rows
        return self._read("request", (-1 if self.purpose == "effect" else rows, self.widths[0]), self._dtype)

    def reply(self) -> torch.Tensor:
        """Returns the reply, shape (num_rows, `widths[1]`), int32 in ring arithmetic and float32 otherwise.

        Raises:
            ConfigurationError: there was no reply, or the tensors were not recorded or are damaged.
        """
        return self._read("reply", (self.num_rows, self.widths[1]), self._dtype)

    def seeded_rows(self) -> SeededRows:
        """Returns the seed and the range of rows in a request for a hint."""
        return SeededRows.unpack(self.request().numpy().tobytes())

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int32 if self.arithmetic == "ring" else torch.float32

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.file is None:
            raise ConfigurationError(f"message {self.seq} was recorded without its tensors: the recording is truncated")
        try:
            with safe_open(self.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise ConfigurationError(f"cannot read {self.file.name}: the recording is damaged") from exc
        if (
            tensor.dtype != dtype
            or tensor.dim() != len(shape)
            or any(w not in (-1, h) for w, h in zip(shape, tensor.shape, strict=True))
        ):
            raise ConfigurationError(f"{self.file.name} does not hold what its index says: the recording is damaged")
        return tensor


@dataclass(frozen=True)
class View:
    """Holds what one provider received, and what it replied.

    Attributes:
        messages: the messages that got a reply, in the order of the replies.
        unanswered: the messages that failed or were cancelled, which have no reply.
        is_ended: whether the recorder wrote that the recording is complete; if not, the last messages may be missing.
    """

    manifest: Manifest
    messages: tuple[Message, ...]
    is_ended: bool = True
    unanswered: tuple[Message, ...] = ()

    @property
    def is_truncated(self) -> bool:
        """Returns whether the tensors of some message with a reply are missing."""
        return any(message.file is None for message in self.messages)

    def with_tensors(self) -> View:
        """Returns the same view up to the first message whose tensors are missing. Of the messages without a reply,
        those with tensors are kept."""
        whole = itertools.takewhile(lambda message: message.file is not None, self.messages)
        kept = tuple(message for message in self.unanswered if message.file is not None)
        return replace(self, messages=tuple(whole), unanswered=kept)

    def of_tenant(self, tenant: str) -> View:
        """Returns a view that holds only the messages of one tenant."""
        theirs = [tuple(one for one in part if one.tenant == tenant) for part in (self.messages, self.unanswered)]
        return replace(self, messages=theirs[0], unanswered=theirs[1])

    def products(self) -> tuple[Message, ...]:
        """Returns all messages that ask for a matrix product of masked rows, including those without a reply, in the
        order of `seq`."""
        found = [message for message in (*self.messages, *self.unanswered) if message.purpose == "product"]
        return tuple(sorted(found, key=lambda message: message.seq))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Returns the tenants' names, in order of appearance."""
        return tuple(dict.fromkeys(message.tenant for message in (*self.messages, *self.unanswered)))

    def select(self, purpose: str, direction: str | None = None, group: int | None = None) -> tuple[Message, ...]:
        """Returns the messages with a reply that have one purpose (`product`, `hint` or `effect`) and, if given, one
        direction and group."""
        return tuple(
            message
            for message in self.messages
            if message.purpose == purpose
            and (direction is None or message.direction == direction)
            and (group is None or message.group == group)
        )


def open_view(folder: Path) -> View:
    """Reads a provider's recording and returns the view of all its messages.

    Raises:
        ConfigurationError: the folder holds no recording, or one that is empty or damaged.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
        lines = (folder / INDEX_NAME).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise no_recording(folder) from exc
    except (OSError, UnicodeDecodeError, VeilbaseError) as exc:
        raise damaged(folder) from exc
    read = [_message(folder, number, line, manifest) for number, line in enumerate(lines, start=1)]
    messages = [message for message, _ in read]
    if any(message.seq != place for place, message in enumerate(messages)):
        raise ConfigurationError(f"{folder / INDEX_NAME} lacks lines, or has them in another order: it was changed")
    is_ended = _is_ended(folder, len(messages))
    if not any(message.file is not None for message in messages):
        raise ConfigurationError(f"the recording in {folder} is empty: no tensor was recorded")
    answered, others = (tuple(one for one, has_reply in read if has_reply is wanted) for wanted in (True, False))
    return View(manifest, answered, is_ended, others)


def _is_ended(folder: Path, num_messages: int) -> bool:
    """Returns whether the recorder wrote its end mark and reports no failure, such as a full disk."""
    try:
        end = _End.model_validate_json((folder / END_NAME).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"{folder / END_NAME} cannot be read: the recording was changed") from exc
    if end.messages != num_messages:
        raise ConfigurationError(
            f"{folder / INDEX_NAME} has {num_messages} lines of {end.messages}: the recording was cut off or changed"
        )
    return not end.failed


def _message(folder: Path, number: int, line: str, manifest: Manifest) -> tuple[Message, bool]:
    """Returns the message that a line of the recording's index describes, and whether the message got a reply."""
    try:
        fields = _Line.model_validate(json.loads(line))
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(
            f"line {number} of {folder / INDEX_NAME} cannot be read: the recording was cut off or changed"
        ) from exc
    if not 0 <= fields.layer < len(manifest.groups):
        raise ConfigurationError(f"line {number} of {folder / INDEX_NAME} names a layer that its model does not have")
    file = None
    if fields.file is not None:
        file = folder / fields.file
        if file.parent != folder or not file.is_file():
            raise ConfigurationError(f"the recording in {folder} lacks {Path(fields.file).name}: it was cut off")
    info = manifest.groups[fields.layer]
    widths = (info.in_features, info.out_features)
    message = Message(
        fields.seq, fields.tenant, fields.layer, fields.direction, fields.arithmetic, fields.purpose, fields.rows, file,
        widths if fields.direction == "forward" else widths[::-1], fields.bits,
    )  # fmt: skip
    return message, fields.answered


@dataclass(frozen=True)
class Exchange:
    """Holds one request and its reply, in the form in which `Message` returns them."""

    group: int
    request: torch.Tensor
    reply: torch.Tensor
    direction: str = "forward"
    purpose: str = "product"
    bits: int = FULL_BITS


def write_recording(folder: Path, manifest: Manifest, exchanges: Iterable[Exchange], tenant: str = "victim") -> View:
    """Writes a recording and opens it.

    Args:
        folder: the folder to make; it must not exist.
        manifest: the manifest; its `groups` must hold every group that the exchanges name.
        exchanges: requests and replies in order. A float32 reply makes a float message, any other makes a ring message.
    """
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    with (folder / INDEX_NAME).open("w", encoding="utf-8") as index:
        for seq, one in enumerate(exchanges):
            name = f"{seq:08d}.safetensors"
            save_file({"request": one.request.contiguous(), "reply": one.reply.contiguous()}, folder / name)
            line = {
                "seq": seq,
                "tenant": tenant,
                "layer": one.group,
                "direction": one.direction,
                "arithmetic": "float" if one.reply.dtype == torch.float32 else "ring",
                "purpose": one.purpose,
                "bits": one.bits,
                "rows": one.reply.shape[0],
                "file": name,
                "truncated": False,
            }
            index.write(json.dumps(line) + "\n")
    return open_view(folder)
