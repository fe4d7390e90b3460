"""Runs `collusion` on traffic under the mask `shares`. The adversary has the views of both providers."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from attacks.adversaries.collusion import ADVERSARY, collude
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import inputs_of, manifest_of
from attacks.seen.view import View
from attacks.victim.synthetic import Exchange, write_recording
from noise.scheme import GroupSpec, Message, encode_rows
from noise.shares import Shares
from wire.frame import Direction, Purpose
from wire.ring.seeded_rows import SEED_BYTES, SeededRows, count_rows

NUM_PROMPTS, NUM_TOKENS = 4, 12
_KIND = "llama"


@dataclass(frozen=True)
class Traffic:
    """Holds both providers' views, and the true encoded rows, float64, by message number (seq) in the first view."""

    view_1: View
    view_2: View
    truth: dict[int, torch.Tensor]


def make(folder: Path, num_prompts: int = NUM_PROMPTS) -> Traffic:
    """Makes traffic under the mask `shares`, with activations of the tiny model and random gradients."""
    shares = Shares(lambda: os.urandom(SEED_BYTES))
    sent: tuple[list[Exchange], list[Exchange]] = [], []
    truth: dict[int, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0x5EED0007)
    for one in inputs_of(_KIND, num_prompts, NUM_TOKENS):
        for group, rows in one.items():
            spec = _spec(group)
            gradients = torch.randn(rows.shape[0], spec.out_features, generator=generator)
            for direction, given in ((Direction.FORWARD, rows), (Direction.BACKWARD, gradients)):
                truth[len(sent[0])] = encode_rows(spec, direction, given)[0].to(torch.float64)
                for message in shares.mask(spec, direction, given).messages:
                    sent[message.provider].append(_exchange(message, spec.widths(direction)[1]))
    views = [write_recording(folder / f"seen{i}", manifest_of(_KIND), part) for i, part in enumerate(sent)]
    return Traffic(views[0], views[1], truth)


def _spec(group: int) -> GroupSpec:
    info = manifest_of(_KIND).groups[group]
    norms = info.max_column_norm, info.max_row_norm
    return GroupSpec(group, info.in_features, info.out_features, *norms, torch.ones(info.out_features))


def _exchange(message: Message, reply_cols: int) -> Exchange:
    """Pairs the message with a reply of zeros, because the adversary does not read replies."""
    rows, call = message.rows, message.call
    num_rows = count_rows(rows)
    request = torch.tensor(list(rows.pack()), dtype=torch.uint8) if isinstance(rows, SeededRows) else rows
    purpose = "hint" if call.purpose is Purpose.HINT else "product"
    reply = torch.zeros(num_rows, reply_cols, dtype=torch.int32)
    return Exchange(call.group, request, reply, call.direction.name.lower(), purpose)


def control() -> ControlResult:
    """Computes the relative error of each message's unmasked rows and returns the largest. A message that was not
    unmasked counts as a guess of zero."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = make(Path(folder))
        stolen = {claim.seq: claim.rows for claim in collude(traffic.view_1, traffic.view_2)}
    nothing = torch.zeros(())
    errors = [float((stolen.get(seq, nothing) - rows).norm() / rows.norm()) for seq, rows in traffic.truth.items()]
    return ControlResult(
        ADVERSARY.name, "`shares`, the views of both providers together", "worst relative error of a message's rows",
        max(errors), 0.0, smaller_wins=True,
    )  # fmt: skip
