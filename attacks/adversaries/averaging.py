"""Averages the messages of a prompt that is repeated under fresh noise, and cleans the mean by principal components.

Messages of one group (layers that read the same input), direction and number of rows are assumed to be repetitions of
one prompt. The noise of the messages' mean falls with the square root of the number of messages. Principal components
of the mean that lie below the edge of the noise's spectrum are left out. The attack fails if the noise is uniform mod
2^32, because the mean of such noise says nothing. The attack does not check whether messages are repetitions. If they
are not, the claim is wrong (attacks/adversaries/principal_components.py handles several prompts under one mask).
Source: Marchenko and Pastur, 1967, for the edge √T + √d of the spectrum of a (T, d) noise matrix.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View

_FEW_SETS = 16
_FEW_CLAIMS = 4
_MOST_MESSAGES = 512


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Computes the cleaned mean of each of the first few sets of messages that may be repetitions, and claims that this
    is the unmasked content of the set's first few messages."""
    sets: dict[tuple[int, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            sets[message.group, message.direction, message.num_rows].append(message)
    claims: list[Claim] = []
    for messages in [messages for messages in sets.values() if len(messages) > 1][:_FEW_SETS]:
        repeats = torch.stack([message.request().to(torch.float64) for message in messages[:_MOST_MESSAGES]])
        if bool(torch.isfinite(repeats).all()):
            mean = clean_mean(repeats)
            claims += [StolenRows(message.seq, mean) for message in messages[:_FEW_CLAIMS]]
    return claims


def clean_mean(repeats: torch.Tensor) -> torch.Tensor:
    """Returns the mean over repetitions without the principal components that noise alone would produce.

    Args:
        repeats: float64, shape (num_repeats, num_rows, d), at least two repetitions.

    Returns:
        The cleaned mean, shape (num_rows, d).
    """
    num_repeats, num_rows, d = repeats.shape
    mean = repeats.mean(0)
    noise = (float(repeats.var(0).mean()) / num_repeats) ** 0.5
    u, values, vt = torch.linalg.svd(mean, full_matrices=False)
    kept = values > noise * (num_rows**0.5 + d**0.5)  # the largest singular value of noise alone
    cleaned: torch.Tensor = (u * torch.where(kept, values, 0.0)) @ vt
    return cleaned


ADVERSARY = Adversary(
    "averaging",
    "a prompt repeated under fresh noise: mean and principal components of its messages",
    attack,
)
