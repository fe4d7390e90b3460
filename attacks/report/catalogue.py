"""Lists all adversaries, in the order of the report, each with its positive control."""

from __future__ import annotations

from attacks.adversaries.byte_statistics import BYTE_STATISTICS
from attacks.adversaries.closed_form import CLOSED_FORM
from attacks.adversaries.collusion import COLLUSION, LEAKED_SECRET, RELEASED_VALUES
from attacks.adversaries.float_masks import (
    AVERAGING,
    DIFFERENCING,
    KNOWN_MASK,
    LOW_BITS,
    PRINCIPAL_COMPONENTS,
    SPHERE_FIT,
    SUBSPACE,
    WHICH_OF_K,
)
from attacks.adversaries.gradients import GRADIENT_EQUATIONS, GRADIENT_VIEW
from attacks.adversaries.lattice_equations import NO_ERROR, SHARED_ERROR, TINY_ERROR
from attacks.adversaries.lattice_reduction import LATTICE_REDUCTION
from attacks.adversaries.prompt_inversion import DEEP_STATE, LAYER0_LOOKUP
from attacks.adversaries.seed_search import SEED_SEARCH
from attacks.adversaries.slot_reuse import SLOT_REUSE
from attacks.adversaries.sparse_secret import SPARSE_SECRET
from attacks.adversaries.substitute import SUBSTITUTE
from attacks.adversaries.traffic_shape import TRAFFIC_SHAPE
from attacks.controls import Control, byte_statistics, collusion, float_masks, lattice, traffic_shape, unmasked
from attacks.report.options import wanted_adversaries
from attacks.seen.adversary import Adversary

CATALOGUE: tuple[tuple[Adversary, Control], ...] = (
    (LAYER0_LOOKUP, unmasked.layer0_lookup_control),
    (DEEP_STATE, unmasked.deep_state_control),
    (CLOSED_FORM, unmasked.closed_form_control),
    (SUBSTITUTE, unmasked.substitute_control),
    (TRAFFIC_SHAPE, traffic_shape.traffic_shape_control),
    (GRADIENT_VIEW, unmasked.gradient_view_control),
    (GRADIENT_EQUATIONS, unmasked.gradient_equations_control),
    (KNOWN_MASK, float_masks.known_mask_control),
    (WHICH_OF_K, float_masks.which_of_k_control),
    (SPHERE_FIT, float_masks.sphere_fit_control),
    (DIFFERENCING, float_masks.differencing_control),
    (AVERAGING, float_masks.averaging_control),
    (PRINCIPAL_COMPONENTS, float_masks.principal_components_control),
    (SUBSPACE, float_masks.subspace_control),
    (LOW_BITS, float_masks.low_bits_control),
    (SEED_SEARCH, float_masks.seed_search_control),
    (NO_ERROR, lattice.no_error_control),
    (LEAKED_SECRET, collusion.leaked_secret_control),
    (RELEASED_VALUES, collusion.released_values_control),
    (SLOT_REUSE, lattice.slot_reuse_control),
    (TINY_ERROR, lattice.tiny_error_control),
    (LATTICE_REDUCTION, lattice.lattice_reduction_control),
    (COLLUSION, collusion.collusion_control),
    (BYTE_STATISTICS, byte_statistics.byte_statistics_control),
    (SPARSE_SECRET, lattice.sparse_secret_control),
    (SHARED_ERROR, lattice.shared_error_control),
)
"""Every adversary, in the order of the report, and the control on which it must win."""
NOT_IN_QUICK = (SPARSE_SECRET.name, SHARED_ERROR.name)
"""The adversaries that the quick profile leaves out, because they take seconds for each public matrix of a lattice
mask. They run in the full profile, on recordings, and in `attacks.programs.weakenings`."""


def adversaries(names: str | None = None) -> list[Adversary]:
    """Returns all adversaries, or those with the given names in the order of the names.

    Args:
        names: comma-separated names; None returns all.

    Raises:
        ConfigurationError: a name is unknown, or `names` holds no name.
    """
    found = {one.name: one for one, _ in CATALOGUE}
    if names is None:
        return list(found.values())
    return [found[name] for name in wanted_adversaries(names, found)]


def quick() -> str:
    """Returns the comma-separated names of the adversaries that the quick profile runs by default."""
    return ",".join(one.name for one, _ in CATALOGUE if one.name not in NOT_IN_QUICK)


def controls(names: str | None = None) -> list[Control]:
    """Returns the control of each adversary that `adversaries` returns for these names, in the order of the report."""
    wanted = {one.name for one in adversaries(names)}
    return [control for one, control in CATALOGUE if one.name in wanted]
