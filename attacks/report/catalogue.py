"""Lists all adversaries, in the order of the report, and their positive controls."""

from __future__ import annotations

import importlib

from attacks.controls.control import Control
from attacks.seen.adversary import Adversary
from wire.command_line import instead
from wire.errors import ConfigurationError

MODULES = (
    "layer0_lookup", "deep_state", "closed_form", "substitute",
    "traffic_shape", "gradient_view", "gradient_equations",
    "known_mask", "which_of_k", "sphere_fit", "differencing", "averaging", "principal_components", "subspace",
    "low_bits", "seed_search",
    "no_error", "leaked_secret", "released_values", "slot_reuse", "arora_ge", "lattice_reduction", "collusion",
    "byte_statistics", "sparse_secret", "shared_error",
)  # fmt: skip
"""The modules of attacks/adversaries that define an adversary, in the order of the report. Each has a control in the
module of the same name in attacks/controls. The other modules of attacks/adversaries hold what adversaries share."""
NOT_IN_QUICK = ("sparse_secret", "shared_error")
"""Modules whose adversaries the quick profile leaves out, because they take seconds for each public matrix of a lattice
mask. They run in the full profile, on recordings, and in `attacks.programs.weakenings`."""


def adversaries(names: str | None = None) -> list[Adversary]:
    """Returns all adversaries, or those with the given names in the order of the names.

    Args:
        names: comma-separated names; None returns all.

    Raises:
        ConfigurationError: a name is unknown, or `names` holds no name.
    """
    found = {one.name: one for one in map(_adversary, MODULES)}
    if names is None:
        return list(found.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in found]
    if unknown or not wanted:
        advice = instead(unknown[0] if unknown else "", found, "--list")
        raise ConfigurationError(f"no adversary {', '.join(unknown)[:80] or repr(names)}: {advice}")
    return [found[name] for name in wanted]


def quick() -> str:
    """Returns the comma-separated names of the adversaries that the quick profile runs by default."""
    return ",".join(_adversary(module).name for module in MODULES if module not in NOT_IN_QUICK)


def controls(names: str | None = None) -> list[Control]:
    """Returns the control of each adversary that `adversaries` returns for these names, in the order of the report."""
    wanted = {one.name for one in adversaries(names)}
    modules = [module for module in MODULES if _adversary(module).name in wanted]
    return [importlib.import_module(f"attacks.controls.{module}").control for module in modules]


def _adversary(module: str) -> Adversary:
    adversary: Adversary = importlib.import_module(f"attacks.adversaries.{module}").ADVERSARY
    return adversary
