"""Weakens the lattice masks of this process on purpose. The programs and tests of attacks/ must notice each weakness.

Each weakness wraps functions that noise/lattice.py calls when it makes masks. All other code of the tenant, compiled
arithmetic included, is unchanged.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from noise import sampling
from noise.lattice import Lattice
from noise.params import LatticeParameters
from wire.frame import Direction

FEW_TRITS = 3
_Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Weakness:
    """Describes one way in which the mask `lattice` is weakened on purpose.

    Attributes:
        inject: a function that returns a context manager; within its block, masks are made with the weakness.
        in_pieces: whether the tenant must make blocks of mask rows in pieces for the weakness to show.
        adversary: the adversary that notices the weakness in a provider's view of traffic that repeats a prompt; None
            if no adversary does.
    """

    name: str
    inject: Callable[[], contextlib.AbstractContextManager[None]]
    in_pieces: bool = False
    adversary: str | None = None


@contextlib.contextmanager
def _sampling(name: str, made_of: Callable[[_Draw], _Draw]) -> Iterator[None]:
    with mock.patch.object(sampling, name, made_of(getattr(sampling, name))):
        yield


def _binary(draw: _Draw) -> _Draw:
    return lambda rng, shape, parameters: draw(rng, shape, parameters).remainder(2)


def _trits(_: _Draw) -> _Draw:
    ternary: _Draw = sampling.ternary
    return lambda rng, shape, parameters: ternary(rng, shape)


def _sparse(draw: _Draw) -> _Draw:
    def sparse(rng: sampling.Csprng, shape: Sequence[int]) -> torch.Tensor:
        secrets = draw(rng, shape)
        for secret in secrets:
            flat = secret.view(-1)
            flat[flat.nonzero()[FEW_TRITS:, 0]] = 0  # only the first few trits stay
        return secrets

    return sparse


def changed(name: str, change: Callable[[torch.Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Lets `change` change, in place, what the sampler `name` has drawn."""

    def made_of(draw: _Draw) -> _Draw:
        def changed(*arguments: Any) -> torch.Tensor:
            drawn = draw(*arguments)
            change(drawn)
            return drawn

        return changed

    return _sampling(name, made_of)


def _repeat_half(errors: torch.Tensor) -> None:
    half = errors.shape[-2] // 2
    errors[..., half : 2 * half, :] = errors[..., :half, :]


def _repeat_negated(errors: torch.Tensor) -> None:
    """Makes two of four rows the negatives of the two before them."""
    for first in range(0, errors.shape[-2] - 3, 4):
        errors[..., first + 2 : first + 4, :] = -errors[..., first : first + 2, :]


def _repeat_some(errors: torch.Tensor) -> None:
    """Lets one number of four repeat that of its feature seven rows before, so that no row is equal to another."""
    for row in range(7, errors.shape[-2], 14):
        errors[..., row : row + 7, ::2] = errors[..., row - 7 : row, ::2][..., : len(range(row, errors.shape[-2])), :]


def _reverse_secret(secrets: torch.Tensor) -> None:
    secrets[:, 1] = secrets[:, 0].flip(-1)


def _same_errors(in_pieces: bool) -> Callable[[_Draw], _Draw]:
    """Returns a wrapper of the error sampler that gives every block (or piece) of one width the same errors."""

    def made_of(draw: _Draw) -> _Draw:
        kept: dict[int, torch.Tensor] = {}

        def same(rng: sampling.Csprng, shape: Sequence[int], parameters: LatticeParameters) -> torch.Tensor:
            rows, width = shape[-2:]
            if (len(shape) == 2) is not in_pieces:
                return draw(rng, shape, parameters)
            if width not in kept or len(kept[width]) < rows:
                kept[width] = draw(rng, (rows, width), parameters)
            return kept[width][:rows].expand(tuple(shape)).clone()

        return same

    return made_of


@contextlib.contextmanager
def _same_secrets(shared_by: Callable[[int, Direction, int], Hashable]) -> Iterator[None]:
    """Gives one lattice secret to all blocks with the same key, where the key is `shared_by(group id, direction, block
    number)`."""
    lock, here = threading.Lock(), threading.local()
    counts: Counter[Any] = Counter()
    kept: dict[Hashable, torch.Tensor] = {}
    draw = sampling.ternary

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(scheme: Lattice, group: Any, direction: Any, count: int) -> Any:
            here.place = group.id, direction
            return make(scheme, group, direction, count)

        return made

    def shared(rng: sampling.Csprng, shape: Sequence[int]) -> torch.Tensor:
        with lock:
            secrets = []
            for _ in range(shape[0]):
                group, direction = here.place
                key = shared_by(group, direction, counts[here.place])
                counts[here.place] += 1
                if key not in kept:
                    kept[key] = draw(rng, (1, *shape[1:]))[0]
                secrets.append(kept[key])
            return torch.stack(secrets)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(sampling, "ternary", shared))
        for name in ("_make_blocks", "_make_pieces"):
            patches.enter_context(mock.patch.object(Lattice, name, noting(getattr(Lattice, name))))
        yield


WEAKNESSES = (
    Weakness("errors in {0, 1}", lambda: _sampling("error", _binary)),
    Weakness("errors in {-1, 0, 1}", lambda: _sampling("error", _trits)),
    Weakness("secrets of three trits", lambda: _sampling("ternary", _sparse), False, "sparse-secret"),
    Weakness("secrets of three trits, in pieces", lambda: _sampling("ternary", _sparse), True, "sparse-secret"),
    Weakness("one error for every block", lambda: _sampling("error", _same_errors(False)), False, "shared-error"),
    Weakness("one error for every piece", lambda: _sampling("error", _same_errors(True)), True, "shared-error"),
    Weakness("one secret for all groups", lambda: _same_secrets(lambda g, d, n: (d, n)), False, "slot-reuse"),
    Weakness("one secret for both directions", lambda: _same_secrets(lambda g, d, n: (g, n)), False, "slot-reuse"),
    Weakness(
        "one secret for all blocks of a group", lambda: _same_secrets(lambda g, d, n: (g, d)), False, "slot-reuse"
    ),
    Weakness(
        "a second half of errors that is the first", lambda: changed("error", _repeat_half), False, "shared-error"
    ),
    Weakness("errors whose row i + 2 is minus row i", lambda: changed("error", _repeat_negated)),
    Weakness("one error of four from seven rows before", lambda: changed("error", _repeat_some)),
    Weakness("a second polynomial that is the first reversed", lambda: changed("ternary", _reverse_secret)),
    Weakness("one secret for all groups, in pieces", lambda: _same_secrets(lambda g, d, n: (d, n)), True, "slot-reuse"),
)
"""The weaknesses that are tested. They apply to masks with the shipped parameters."""
