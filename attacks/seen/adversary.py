"""What every adversary is: a name, and a function from a view and the public model to claims about the tenant.

An adversary module may import wire, noise.params and the modules of attacks that hold no truth (view, passes,
public_model, this one): import-linter checks it. Whether a claim is right is for attacks/truth/judge.py, which knows
the victim; an adversary never learns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View


@dataclass(frozen=True)
class StolenDelta:
    """What the adapter adds to one base layer: ΔW, float64, shape (in_features, out_features)."""

    layer: str
    delta: torch.Tensor


@dataclass(frozen=True)
class StolenTokens:
    """The first tokens of one prompt of the view (its place in `forward_passes.prompts`): all that were given to a
    layer, or as far as the adversary tried. Whoever tries a token and has no idea names any: what is not named was not
    tried."""

    prompt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StolenRows:
    """The unmasked rows of one message, up to the rounding of its arithmetic; float64, the shape of its request."""

    seq: int
    rows: torch.Tensor


@dataclass(frozen=True)
class StolenDifference:
    """Unmasked rows of one message minus those of another; float64, as many rows as both have."""

    seq: int
    other_seq: int
    rows: torch.Tensor


@dataclass(frozen=True)
class StolenFact:
    """Something read from metadata, such as the number of prompt tokens.

    Attributes:
        value: a tuple says: one of these, which look alike to the adversary.
    """

    name: str
    value: str | int | float | tuple[str, ...]


Claim = StolenDelta | StolenTokens | StolenRows | StolenDifference | StolenFact


@dataclass(frozen=True)
class Adversary:
    """One entry of the catalogue.

    Attributes:
        name: as in the table, such as `closed-form`.
        summary: one line for --list: what it uses, what it yields.
        attack: view of one tenant, public model, rows that another adversary opened (None: the recorded ones).
        opens_masks: its StolenRows are handed to the other adversaries, which then run once more on them.
    """

    name: str
    summary: str
    attack: Callable[[View, PublicModel, Opened | None], list[Claim]]
    opens_masks: bool = False
