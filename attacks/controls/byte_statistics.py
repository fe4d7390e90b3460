"""Checks that `byte-statistics` names the fault of masks that are missing, too narrow, badly scaled, or reused.

The adversary must not name a fault in honest masks. Those tested are a mask that is uniform mod 2^32, and a lattice
mask with the shipped parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from attacks.adversaries.byte_statistics import BYTE_STATISTICS, FACT, STEPS, Uniformity, look
from attacks.controls import ControlResult
from attacks.controls.lattice import LatticeTraffic, manifest, no_model
from attacks.seen.adversary import StolenFact
from attacks.seen.view import Exchange, View, write_recording
from noise.params import PARAMETERS
from wire.ring import coding

NUM_ROWS, NUM_FEATURES = 256, 64
_ACTIVATION = 1 << 15
"""The standard deviation of encoded rows, before features get different sizes of 0.5 to 1.5 times this."""


@dataclass(frozen=True)
class Case:
    """Holds the messages that a provider receives for one group.

    Attributes:
        rows: int32, shape (num_rows, NUM_FEATURES).
        shows_in: the faults that the adversary must name; if this set is empty, the adversary may name none.
    """

    rows: torch.Tensor
    shows_in: frozenset[str] = frozenset()


def activations(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """Draws encoded rows that resemble those of a model, int64. Features have different sizes, and neighbouring rows
    are similar."""
    sizes = torch.rand(NUM_FEATURES, generator=generator) + 0.5
    steps = torch.randn(num_rows + 3, NUM_FEATURES, generator=generator)
    smooth = steps.unfold(0, 4, 1).mean(dim=-1) * 2  # (num_rows, features), the mean of four tokens
    return (smooth * sizes * _ACTIVATION).to(torch.int64)


def uniform(num_rows: int, num_features: int, generator: torch.Generator) -> torch.Tensor:
    """Draws a mask that is uniform mod 2^32; int64, shape (num_rows, num_features)."""
    return torch.randint(-(1 << 31), 1 << 31, (num_rows, num_features), generator=generator)


def cases(seed: int = 0) -> Mapping[str, Case]:
    """Returns messages under faulty and honest masks by the mask's name. In `record`, case i becomes layer group i."""
    generator = torch.Generator().manual_seed(seed)
    rows, mask = activations(NUM_ROWS, generator), uniform(NUM_ROWS, NUM_FEATURES, generator)
    line = uniform(1, NUM_ROWS + NUM_FEATURES, generator)[0].unfold(0, NUM_FEATURES, 1)[:NUM_ROWS]
    everywhere = frozenset(("bytes", *STEPS))
    sent = {
        "full mask": (rows + mask, frozenset[str]()),
        "no mask": (rows, frozenset(("bytes", "along columns"))),
        "low 24 bits masked": (rows + mask % (1 << 24), everywhere),
        "mask of 24 bits": (rows + (mask >> 8), frozenset(("bytes",))),
        "mask of 31 bits, to one side": (rows + mask % (1 << 31), everywhere),
        "one number as the mask of all": (rows + mask[0, 0], everywhere),
        "scaled by 2^8 after masking": ((rows + mask) << 8, everywhere),
        "same mask for all rows": (rows + mask[:1], frozenset(("along columns",))),
        "same mask for two rows": (rows + mask.repeat_interleave(2, 0)[:NUM_ROWS], frozenset(("along columns",))),
        "same mask for two features": (
            rows + mask.repeat_interleave(2, 1)[:, :NUM_FEATURES], frozenset(("along rows",)),
        ),
        "mask shifted on by a feature a row": (rows + line.flip(1), frozenset(("one place on",))),
        "mask shifted back by a feature a row": (rows + line, frozenset(("one place back",))),
        "lattice": (_under_lattice(generator), frozenset[str]()),
    }  # fmt: skip
    return {name: Case(coding.to_int32(rows), shows_in) for name, (rows, shows_in) in sent.items()}


def _under_lattice(generator: torch.Generator) -> torch.Tensor:
    """Draws a block of activations and masks it with a lattice mask of the shipped parameters; int64."""
    mask = LatticeTraffic(PARAMETERS["default"], NUM_FEATURES).block().to(torch.int64)
    return activations(len(mask), generator) + mask


def record(folder: Path, sent: Mapping[str, Case]) -> View:
    """Makes a recording in which each case is a layer group with two messages. The messages of every second group are
    gradients."""
    exchanges = [
        Exchange(group, part, torch.zeros_like(part), "forward" if group % 2 else "backward")
        for group, case in enumerate(sent.values())
        for part in case.rows.chunk(2)
    ]
    return write_recording(folder, manifest(*[NUM_FEATURES] * len(sent)), exchanges)


def is_right(found: Uniformity, group: int, case: Case) -> bool:
    """Returns whether the adversary named all faults in `case.shows_in`; it may name more. If that set is empty,
    because the mask is honest, the adversary must name none."""
    (figures,) = (one for one in found.looked_at if one.group == group)
    words = set(figures.faults(found.bound))
    return words >= case.shows_in if case.shows_in else not words


def byte_statistics_control() -> ControlResult:
    """Computes the share of cases that the adversary judges correctly; 0 if the adversary does not claim the faults
    that its function `look` finds."""
    sent = cases()
    with tempfile.TemporaryDirectory() as scratch:
        view = record(Path(scratch) / "seen", sent)
        found, claims = look(view), BYTE_STATISTICS.attack(view, no_model(), None)
    right = sum(is_right(found, group, case) for group, case in enumerate(sent.values())) / len(sent)
    if StolenFact(FACT, ", ".join(found.faults())) not in claims:
        right = 0.0
    setting = f"{sum(bool(case.shows_in) for case in sent.values())} faults of masks, a full mask, the lattice's"
    return ControlResult(BYTE_STATISTICS.name, setting, "faults named for what they are, others not", right, 1.0, False)
