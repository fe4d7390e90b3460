"""Observes the secrets and errors of a tenant's lattice masks from inside the tenant's own process.

This finds weaknesses that no recording shows. For example, at the shipped dimension a provider cannot tell errors in
{0, 1} from others. The observed secret s is the one with which the mask was computed. The observed error is what
remains of a finished mask after A·s is subtracted, where A is the public matrix. So both are those of the masks that
are sent, however and wherever they were drawn. Whole blocks, pieces of blocks and the compiled arithmetic are all
covered, because all of them run inside the functions that are wrapped. The wrapping uses unittest.mock, because noise/
has no interface for this.

Only statistics are written, and never a sample. Samples and their keyed hashes stay in the memory of this process until
the `Watch` is dropped. A watch observes only the process in which it runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from noise import sampling
from noise.blocks.pool import Block
from noise.lattice import Lattice
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import negacyclic
from noise.scheme import GroupSpec
from wire.frame import Direction

DEFAULT = PARAMETERS["default"]
CORNER_ROWS, CORNER_FEATURES, PREFIX = 16, 32, 2048
"""These sizes say which errors of a block, or of a piece of a block, are kept for comparison with those of all others.
They are the first `CORNER_FEATURES` features of the first `CORNER_ROWS` rows, and the first `PREFIX` numbers in memory
order. The first `CORNER_FEATURES` numbers of each row are hashed."""


@dataclass(frozen=True)
class Place:
    """Identifies what a mask was made for.

    Attributes:
        session: the number of the mask scheme among those that the watch has seen, from 0.
        group: the group's id.
    """

    session: int
    group: int
    direction: Direction


@dataclass(frozen=True)
class Unit:
    """Describes one block of mask rows, or one piece of a block, that was made at once.

    Attributes:
        secret: the index, in `Watch.secrets`, of the secret with which the unit was made.
        first_row: the position of the unit's first row in its block.
        corner: the errors of the first rows and features, int16, shape (CORNER_ROWS, CORNER_FEATURES) at most.
        prefix: the first errors in memory order, int16, shape (PREFIX,) at most.
    """

    place: Place
    secret: int
    first_row: int
    corner: torch.Tensor = field(repr=False)
    prefix: torch.Tensor = field(repr=False)


@dataclass
class Errors:
    """Holds the errors of one block or piece until they are added to the statistics; then they are dropped."""

    unit: Unit
    numbers: torch.Tensor = field(repr=False)


class Watch:
    """Collects secrets and errors in the order in which masks are made. The class is thread-safe.

    Attributes:
        secrets: the secrets from which masks were made, each int8, shape (rank, ring_degree).
        places: for each secret, what the mask was made for.
        units: all blocks and pieces.
        trits_drawn, errors_drawn: how many trits and errors were requested from noise.sampling.
        num_unknown: the number of calls, blocks and pieces whose masks were made in a way that the watch does not
            understand, so that their errors were not observed.
    """

    def __init__(self, parameters: LatticeParameters, keep: Callable[[Errors], None]) -> None:
        """Makes a watch that has not seen any mask yet.

        Args:
            parameters: the parameters of the masks.
            keep: a function that is called with the errors of each unit, by one thread at a time.
        """
        self.parameters = parameters
        self.secrets: list[torch.Tensor] = []
        self.places: list[Place] = []
        self.units: list[Unit] = []
        self.trits_drawn = self.errors_drawn = self.num_unknown = 0
        self._keep = keep
        self._lock = threading.RLock()
        self._here = threading.local()
        self._known: dict[int, _Transformed] = {}
        self._sessions: dict[int, tuple[int, Lattice]] = {}
        self._combine = negacyclic.combine

    # ---- what is wrapped --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        """Returns a context manager, within whose block every lattice mask that this process makes is watched.
        Functions that are already patched are wrapped, too."""
        self._combine = negacyclic.combine
        with contextlib.ExitStack() as patches:
            for owner, name, spy in (
                (sampling, "ternary", self._ternary),
                (sampling, "error", self._error),
                (negacyclic, "secret_transform", self._secret_transform),
                (negacyclic, "combine", self._combined),
                (Lattice, "_make_blocks", functools.partial(self._made, False)),
                (Lattice, "_make_pieces", functools.partial(self._made, True)),
            ):
                patches.enter_context(mock.patch.object(owner, name, _wrapped(getattr(owner, name), spy)))
            yield self

    def _ternary(self, original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        drawn = original(*arguments)
        with self._lock:
            self.trits_drawn += drawn.numel()
        return drawn

    def _error(self, original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        drawn = original(*arguments)
        with self._lock:
            self.errors_drawn += drawn.numel()
        return drawn

    def _secret_transform(self, original: Callable[..., torch.Tensor], secrets: torch.Tensor) -> torch.Tensor:
        made = original(secrets)
        with self._lock:  # the transforms are kept, so that no other object gets their id
            self._known[id(made)] = _Transformed(made, secrets.clone())
        return made

    def _combined(
        self, original: Callable[..., torch.Tensor], matrix: Any, secrets_hat: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        self._here.last = matrix, secrets_hat
        return original(matrix, secrets_hat, *others, **named)

    def _made(
        self,
        in_pieces: bool,
        original: Callable[..., list[Block]],
        scheme: Lattice,
        group: GroupSpec,
        direction: Direction,
        count: int,
    ) -> list[Block]:
        self._here.last = None
        blocks = original(scheme, group, direction, count)
        with self._lock:
            number, _ = self._sessions.setdefault(id(scheme), (len(self._sessions), scheme))
            self._look_at(Place(number, group.id, direction), blocks, in_pieces)
        return blocks

    # ---- what was made ----------------------------------------------------------------------------------------------

    def _look_at(self, place: Place, blocks: Sequence[Block], in_pieces: bool) -> None:
        """Subtracts A·s from the masks that a thread has just made, and keeps the errors that remain."""
        last: tuple[negacyclic.Transforms, torch.Tensor] | None = self._here.last
        known = self._known.get(id(last[1])) if last is not None else None
        if last is None or known is None:
            self.num_unknown += 1
            return
        if not known.numbers or not in_pieces or self.places[known.numbers[0]] != place:  # else the same block goes on
            known.numbers = range(len(self.secrets), len(self.secrets) + len(known.secrets))
            self.secrets += known.secrets.unbind()
            self.places += [place] * len(known.secrets)
        pure = self._combine(*last)  # int32, (B, N, features)
        starts = [(index, 0) for index in range(len(blocks))]
        if in_pieces:
            starts = [(0, first) for first in known.next_rows([len(block.mask) for block in blocks])]
        for block, (index, first) in zip(blocks, starts, strict=True):
            without = pure[index, first : first + len(block.mask)]
            if without.shape == block.mask.shape:
                self._note(place, known.numbers[index], first, block.mask - without)  # mod 2^32
            else:
                self.num_unknown += 1

    def _note(self, place: Place, secret: int, first_row: int, error: torch.Tensor) -> None:
        corner = error[:CORNER_ROWS, :CORNER_FEATURES].clamp(-(2**15), 2**15 - 1).to(torch.int16)
        prefix = error.flatten()[:PREFIX].clamp(-(2**15), 2**15 - 1).to(torch.int16)
        unit = Unit(place, secret, first_row, corner, prefix)
        self.units.append(unit)
        self._keep(Errors(unit, error))


@dataclass
class _Transformed:
    """Holds secrets, and the transforms that were computed from them.

    Attributes:
        numbers: the indices of the secrets in `Watch.secrets`; empty before the first mask is made from them.
        num_rows: the number of rows of the block that were made so far, if blocks are made in pieces.
    """

    transforms: torch.Tensor = field(repr=False)
    secrets: torch.Tensor = field(repr=False)
    numbers: range = range(0)
    num_rows: int = 0

    def next_rows(self, counts: Sequence[int]) -> list[int]:
        """Returns the first row of each piece, from the sizes of the pieces. The pieces of a block are made in
        order."""
        starts = []
        for count in counts:
            starts.append(self.num_rows)
            self.num_rows += count
        return starts


def _wrapped(original: Callable[..., Any], spy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return spy(original, *arguments, **named)

    return wrapper
