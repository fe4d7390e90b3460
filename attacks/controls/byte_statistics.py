"""One direction of one group left unmasked, and masks of 24 bits, are noticed; a full mask beside them is not."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

import torch

from attacks.adversaries import byte_statistics
from attacks.adversary import StolenFact
from attacks.controls.control import ControlResult
from attacks.controls.tiny import tiny_manifest, tiny_public
from attacks.synthetic import Exchange, write_recording
from wire.manifest import Manifest

_ROWS = 256


def control() -> ControlResult:
    """Share of right answers over three groups: unmasked gradients, 24-bit masks, full masks."""
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = tiny_manifest("llama", "int8", Path(scratch) / "model")
        exchanges = []
        for group, bits, direction in ((0, 0, "backward"), (1, 24, "forward"), (2, 32, "forward")):
            rows = (torch.randn(_ROWS, _width(manifest, group, direction), generator=generator) * 1e4).to(torch.int32)
            data = bytearray(secrets.token_bytes(4 * rows.numel()))
            mask = torch.frombuffer(data, dtype=torch.int32).view_as(rows)
            mask = torch.zeros_like(mask) if bits == 0 else mask >> (32 - bits)
            reply_cols = _width(manifest, group, "backward" if direction == "forward" else "forward")
            reply = torch.zeros(_ROWS, reply_cols, dtype=torch.int32)
            exchanges.append(Exchange(group, rows + mask, reply, direction))
        view = write_recording(Path(scratch) / "seen", manifest, exchanges)
        claims = byte_statistics.ADVERSARY.attack(view, tiny_public("llama", manifest), None)
    named = next((str(claim.value) for claim in claims if isinstance(claim, StolenFact)), "")
    right = float(named == "0 backward, 1 forward")
    return ControlResult(
        "byte-statistics", "unmasked gradients, and masks of 24 bits", "both named, a full mask not", right, 1.0,
        smaller_wins=False,
    )  # fmt: skip


def _width(manifest: Manifest, group: int, direction: str) -> int:
    info = manifest.groups[group]
    return info.in_features if direction == "forward" else info.out_features
