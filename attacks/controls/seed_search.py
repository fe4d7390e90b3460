"""Runs `seed-search` on masks and a lattice secret from a generator whose seed is a small number or the time."""

from __future__ import annotations

import tempfile
import time

import torch

from attacks.adversaries.seed_search import ADVERSARY
from attacks.controls import lattice_traffic
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import Traffic, exchange, inputs_of, record, row_errors, to_ring, uniform
from attacks.victim.synthetic import Exchange
from noise.params import PARAMETERS

SMALL_SEED = 977


def seeded_traffic(folder: str, ring: bool, first_seed: int) -> Traffic:
    """Makes the traffic of two prompts. The mask of message i comes from a generator with seed `first_seed` + i."""
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    for one in inputs_of("llama", 2, 12):
        for group in (0, 2, 4, 6):
            generator = torch.Generator().manual_seed(first_seed + len(sent))
            rows = to_ring(one[group]) if ring else one[group]
            mask = uniform(rows.shape, generator) if ring else torch.randn(rows.shape, generator=generator)
            sent.append((exchange("llama", group, rows + mask), rows))
    return record("llama", folder, sent)


def seeded_secret_error() -> float:
    """Returns the relative error of the claimed rows under a lattice mask of shipped size whose secret comes from a
    small seed."""
    traffic = lattice_traffic.Traffic(PARAMETERS["default"], 32)
    generator = torch.Generator().manual_seed(SMALL_SEED)
    shape = 1, traffic.parameters.rank, traffic.parameters.ring_degree
    mask = traffic.block(torch.randint(-1, 2, shape, generator=generator).to(torch.int8))
    for rows in (slice(0, 5), slice(5, 12)):
        traffic.send(traffic.activations(rows.stop - rows.start), mask[rows])
    return traffic.relative_error(traffic.attacked(ADVERSARY.attack))


def control() -> ControlResult:
    """Computes the largest relative error of a message's unmasked rows, over three kinds of masks: float masks from a
    small seed, int32 masks from the time as a seed, and a lattice mask whose secret comes from a seed."""
    worst = 0.0
    for ring, first_seed in ((False, SMALL_SEED), (True, int(time.time()) - 60)):
        with tempfile.TemporaryDirectory() as folder:
            traffic = seeded_traffic(folder, ring, first_seed)
            errors = row_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
        worst = max(worst, *(errors.get(seq, 1.0) for seq in traffic.truth))
    worst = max(worst, seeded_secret_error())
    return ControlResult(
        ADVERSARY.name, "seed 977 in float, the clock in the ring, a lattice secret of seed 977",
        "worst relative error of a message's rows", worst, 1e-4, smaller_wins=True,
    )  # fmt: skip
