"""Makes recordings from given tensors, in the recorder's own format, for controls and tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from attacks.seen.view import INDEX_NAME, MANIFEST_NAME, View, open_view
from wire.manifest import Manifest


@dataclass(frozen=True)
class Exchange:
    """Holds one request and its reply, in the form in which `Message` returns them."""

    group: int
    request: torch.Tensor
    reply: torch.Tensor
    direction: str = "forward"
    purpose: str = "product"


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
                "rows": one.reply.shape[0],
                "file": name,
                "truncated": False,
            }
            index.write(json.dumps(line) + "\n")
    return open_view(folder)
