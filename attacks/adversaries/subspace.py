"""Removes noise that lies in a small subspace: principal components find the subspace, and its part of the rows is
removed.

Strong noise of rank r makes the first r eigenvalues of the rows' second moment large. The rows without their part along
the eigenvectors are the unmasked rows without their part in the subspace. Noise in all directions cannot be removed in
this way; then the claim is as wrong as the message. Source: our derivation; principal component analysis.
"""

from __future__ import annotations

import torch

from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

_MOST_MESSAGES = 64
_MOST_STREAMS = 24
"""The most groups and directions that are attacked. A tiny model has fewer. SmolLM2 has 240, and the
eigenvectors for 1,536 features take seconds each time."""
_LARGEST_SHARE = 4
"""A subspace counts as small if its number of dimensions is at most the number of features, and at most the number of
rows, divided by this."""


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Removes the noise's subspace from the first messages of the first groups, and claims the rows that remain; see
    `Adversary.attack`."""
    claims: list[Claim] = []
    products = view.with_tensors().select("product")
    streams = list(dict.fromkeys((message.group, message.direction) for message in products))
    for group, direction in streams[:_MOST_STREAMS]:
        messages = [m for m in products if (m.group, m.direction) == (group, direction)][:_MOST_MESSAGES]
        requests = {message.seq: message.request().to(torch.float64) for message in messages}
        rows = torch.cat(list(requests.values()))
        span = noise_span(rows) if bool(torch.isfinite(rows).all()) else None
        if span is not None:
            claims += [StolenRows(seq, request - request @ span @ span.t()) for seq, request in requests.items()]
    return claims


def noise_span(rows: torch.Tensor) -> torch.Tensor | None:
    """Returns an orthonormal basis of the directions with the largest eigenvalues, shape (d, r). The rank r is where
    the eigenvalues fall most steeply; it is at most a quarter of num_rows and of d. Returns None for fewer than four
    rows or features.

    Args:
        rows: float64, shape (num_rows, d).
    """
    num_rows, d = rows.shape
    largest = min(d, num_rows) // _LARGEST_SHARE
    if largest < 1:
        return None
    values, vectors = torch.linalg.eigh(rows.t() @ rows)  # ascending
    values = values.flip(0).clamp_min(float(values[-1]) * 1e-15 + 1e-300)
    rank = 1 + int((values[:largest] / values[1 : largest + 1]).argmax())
    span: torch.Tensor = vectors[:, -rank:]
    return span


ADVERSARY = Adversary(
    "subspace-projection",
    "noise within a small span: principal components give the span, rows off it are bare",
    attack,
)
