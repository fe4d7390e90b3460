"""Runs the adversaries that need somebody's help, and gives them this help."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from attacks.adversaries.collusion import (
    COLLUSION,
    LEAKED_SECRET,
    RELEASED_VALUES,
    collude,
    open_block,
    seek_error,
    seek_secret,
)
from attacks.adversaries.ring_lwe import PublicMatrix
from attacks.controls import ControlResult
from attacks.controls.float_masks import inputs_of, manifest_of
from attacks.controls.lattice import LatticeTraffic
from attacks.seen.view import Exchange, View, write_recording
from noise import sampling
from noise.masks.shares import Shares
from noise.params import PARAMETERS, LatticeParameters
from noise.scheme import GroupSpec, Message, encode_rows
from wire.frame import Direction, Purpose
from wire.ring.seeded_rows import SEED_BYTES, SeededRows, count_rows

# ---- collusion ------------------------------------------------------------------------------------------------------
#
# Runs `collusion` on traffic under the mask `shares`. The adversary has the views of both providers.

NUM_PROMPTS, NUM_TOKENS = 4, 12
_KIND = "llama"


@dataclass(frozen=True)
class SharesTraffic:
    """Holds both providers' views, and the true encoded rows, float64, by message number (seq) in the first view."""

    view_1: View
    view_2: View
    truth: dict[int, torch.Tensor]


def shares_traffic(folder: Path, num_prompts: int = NUM_PROMPTS) -> SharesTraffic:
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
    return SharesTraffic(views[0], views[1], truth)


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


def collusion_control() -> ControlResult:
    """Computes the relative error of each message's unmasked rows and returns the largest. A message that was not
    unmasked counts as a guess of zero."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = shares_traffic(Path(folder))
        stolen = {claim.seq: claim.rows for claim in collude(traffic.view_1, traffic.view_2)}
    nothing = torch.zeros(())
    errors = [float((stolen.get(seq, nothing) - rows).norm() / rows.norm()) for seq, rows in traffic.truth.items()]
    return ControlResult(
        COLLUSION.name, "`shares`, the views of both providers together", "worst relative error of a message's rows",
        max(errors), 0.0, smaller_wins=True,
    )  # fmt: skip


# ---- leaked-secret --------------------------------------------------------------------------------------------------
#
# Runs the function `open_block` of `leaked-secret` on a mask with the default lattice parameters. The function gets the
# block's secret, and must recover the rows up to the lattice error.

NUM_LEAKED = 64


def leaked_secret_control() -> ControlResult:
    """Computes the relative error of a block's first rows. The adversary wins if the lattice error alone can cause this
    error."""
    parameters = PARAMETERS["default"]
    traffic = LatticeTraffic(parameters, 32)
    rows, mask = traffic.activations(NUM_LEAKED), traffic.block()[:NUM_LEAKED]
    traffic.send(rows, mask)
    public = PublicMatrix(traffic.matrix.to(torch.int64), parameters.ring_degree)
    opened = open_block(traffic.exchanges[-1].request, public, traffic.secrets[0])
    error = float((opened - rows).to(torch.float64).norm() / rows.to(torch.float64).norm())
    needed = sampling.error_bound(parameters) * rows.numel() ** 0.5 / float(rows.to(torch.float64).norm())
    setting = "lattice mask 3x512 (default), the block's secret given"
    return ControlResult(LEAKED_SECRET.name, setting, "relative error of the unmasked rows", error, needed, True)


# ---- released-values ------------------------------------------------------------------------------------------------
#
# Runs the functions of `released-values` at the default lattice parameters, on results that are not rounded.
#
# A client of the tenant and the provider work together. The client knows the prompts that it sent and gets their
# results. The two must recover the rows of other prompts under the same secret, up to the lattice error.

NUM_FEATURES, NUM_KNOWN, NUM_OTHERS = 64, 32, 16


def relative_error(parameters: LatticeParameters, step: float, num_given: int = 2 * NUM_FEATURES) -> float:
    """Runs the attack once, and returns the relative error of the rows of prompts that the client does not know; 1 if
    the attack finds no secret.

    Args:
        parameters: the lattice mask's parameters.
        step: results, which are whole numbers, are rounded to multiples of this; 0 leaves them as they are.
        num_given: the number of results that the client gets for each row.
    """
    traffic = LatticeTraffic(parameters, NUM_FEATURES)
    rows, mask = traffic.activations(NUM_KNOWN + NUM_OTHERS), traffic.block()[: NUM_KNOWN + NUM_OTHERS]
    sent = rows + mask.to(torch.int64)
    public = PublicMatrix(traffic.matrix.to(torch.int64), parameters.ring_degree)
    own = open_block(sent, public, traffic.secrets[0])  # x̃ + e, as the tenant computes with it
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (NUM_FEATURES, num_given), generator=generator)
    released = (own[:NUM_KNOWN] @ weight).to(torch.float64)
    released = (released / step).round() * step if step else released
    error = seek_error(released, rows[:NUM_KNOWN], weight)
    secret = seek_secret(sent[:NUM_KNOWN], rows[:NUM_KNOWN], error, traffic.seed, parameters.ring_degree)
    others = rows[NUM_KNOWN:].to(torch.float64)
    found = torch.zeros_like(others)
    if secret is not None:
        found = open_block(sent, public, secret)[NUM_KNOWN:].to(torch.float64)
    return float((found - others).norm() / others.norm())


def released_values_control() -> ControlResult:
    """Computes the relative error of rows that the client does not know. The adversary wins if the lattice error alone
    can cause this error."""
    parameters = PARAMETERS["default"]
    error = relative_error(parameters, step=0.0)
    # an encoded activation of this traffic is up to 2^17, and half of that on average
    needed = sampling.error_bound(parameters) / (1 << 16)
    setting = "lattice mask 3x512 (default), unrounded results of known prompts"
    return ControlResult(RELEASED_VALUES.name, setting, "relative error of other prompts' rows", error, needed, True)
