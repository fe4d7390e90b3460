"""This module gets hints, from the provider or by computing them, and makes masks, before a model is used.

A hint is the product of the lattice mask's public matrix and the weight of a layer group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from noise.masks.lattice import Lattice
from noise.masks.pad import Pad
from noise.scheme import GroupSpec, MaskScheme, WeightOf
from tenant_sdk.model.build import group_spec, load_alphas
from tenant_sdk.progress import counting
from wire.frame import Direction
from wire.manifest import Manifest


def prefetch_hints(
    scheme: MaskScheme, manifest: Manifest, folder: Path, directions: Iterable[Direction], progress: bool
) -> None:
    """Fetches or computes every hint (a weight's product with the public matrix) that is not on disk; a repeated call
    continues one that was interrupted.

    Args:
        scheme: the mask; nothing is done unless the mask is a `Lattice` that stores hints.
        manifest, folder: the provider's manifest and its bundle's folder.
        directions: FORWARD, and BACKWARD for fine-tuning.
        progress: whether to show a bar.

    Raises:
        ConfigurationError: the disk has no room for them; none was fetched.
    """
    if not isinstance(scheme, Lattice) or not scheme.keeps_hints:
        return
    wanted = list(_pairs(manifest, folder, directions))
    scheme.check_room(wanted)
    what = "computing hints" if scheme.computes_hints else "fetching hints"
    with counting(what, progress and not scheme.has_hints(wanted)) as report:
        for done, (group, direction) in enumerate(wanted, 1):
            scheme.prefetch(group, direction)
            report(done, len(wanted))


def settle_hints(scheme: MaskScheme, manifest: Manifest, folder: Path, weight_of: WeightOf | None) -> str | None:
    """Decides whether the lattice mask's hints are computed here or fetched; see `Lattice.settle_hints`, which also
    says what is returned. Other masks have no hints."""
    if not isinstance(scheme, Lattice):
        return None
    return scheme.settle_hints(weight_of, list(_pairs(manifest, folder, (Direction.FORWARD, Direction.BACKWARD))))


def prepare_masks(
    scheme: MaskScheme,
    manifest: Manifest,
    folder: Path,
    directions: Iterable[Direction],
    num_rows: int,
    progress: bool = False,
) -> None:
    """Makes masks for `num_rows` tokens in every layer, or for fewer tokens if the pool of masks is too small. Does
    nothing for a mask other than `Lattice` and `Pad`. `progress` tells whether to show how far this is."""
    if isinstance(scheme, Lattice | Pad):
        wanted = list(_pairs(manifest, folder, directions))
        row_bytes = sum(scheme.pool.row_bytes(group, direction) for group, direction in wanted)
        with counting("making masks", progress) as report:
            for done, (group, direction) in enumerate(wanted, 1):
                scheme.prepare(group, direction, min(num_rows, scheme.pool.fitting_rows(row_bytes)))
                report(done, len(wanted))


def _pairs(manifest: Manifest, folder: Path, directions: Iterable[Direction]) -> Iterator[tuple[GroupSpec, Direction]]:
    alphas, cpu = load_alphas(folder, manifest), torch.device("cpu")
    for direction in directions:
        for info in manifest.groups:
            yield group_spec(info, alphas, cpu), direction
