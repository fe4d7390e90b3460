"""Defines the interface of every adversary: a name, and a function from a view and the public model to claims.

An adversary module may import wire, noise.params and the modules of attacks that hold no truth (those in attacks/seen
and attacks/adversaries); import-linter checks this. Whether a claim is right is decided in attacks/truth/judge.py,
which knows the victim. An adversary never learns the decision.
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
    """Claims the adapter's change of one base layer: ΔW, float64, shape (in_features, out_features)."""

    layer: str
    delta: torch.Tensor


@dataclass(frozen=True)
class StolenTokens:
    """Claims the first tokens of one prompt. These are all tokens that went through the layers, or fewer if the
    adversary tried fewer.

    `prompt` is the prompt's number in `forward_passes.prompts`. If an adversary tries a position, it names a token even
    without evidence. So positions without a token were not tried.
    """

    prompt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StolenRows:
    """Claims the unmasked rows of one message, in the units of the request: encoded rows in ring arithmetic, else the
    rows themselves; float64, the request's shape. They may still hold a small error, such as that of a lattice mask."""

    seq: int
    rows: torch.Tensor


@dataclass(frozen=True)
class StolenDifference:
    """Claims the unmasked rows of one message minus those of another, row by row up to the end of the shorter message;
    float64."""

    seq: int
    other_seq: int
    rows: torch.Tensor


@dataclass(frozen=True)
class StolenFact:
    """Claims a fact that is none of the above, such as the number of prompt tokens or the labels of a batch.

    Attributes:
        value: the claimed value. A tuple means that one of its entries is true, and that the adversary cannot tell
            which.
    """

    name: str
    value: str | int | float | tuple[str, ...]


Claim = StolenDelta | StolenTokens | StolenRows | StolenDifference | StolenFact


@dataclass(frozen=True)
class Adversary:
    """Describes one adversary of the catalogue.

    Attributes:
        name: the name in the report's table, such as `closed-form`.
        summary: one line for --list: what the adversary uses and what it yields.
        attack: a function that returns claims. It takes the view of one tenant, the public model, and the rows that
            another adversary unmasked; None stands for the recorded rows.
        opens_masks: whether the adversary's StolenRows are handed to other adversaries, which then run once more on
            these rows.
    """

    name: str
    summary: str
    attack: Callable[[View, PublicModel, Opened | None], list[Claim]]
    opens_masks: bool = False
