"""This module holds the code that the adversaries of the lattice mask share: the public matrix, rows as equations, and
unmasking.

All arithmetic is on exact integers mod 2^32. Row t of a block is z_t = x̃_t + coefficient t of Σ_i A_i·s_i + e_t in
Z[X]/(X^N + 1), with a public A_i, a secret s_i and an error e_t. Its equations are those of row 0 with the secret
X^-t·s. So an attack may take any row as row 0. It need not know where blocks begin, and A needs to be prepared only
once for every row of every block. Unmasking goes from that row in both directions as long as the resulting rows are
small. A wrong secret, or a row of another block, gives numbers that are uniform mod 2^32.

Source: docs/architecture.md, "Masks"; Lyubashevsky, Peikert, Regev, "On ideal lattices and learning with errors over
rings", EUROCRYPT 2010, section 1 (a ring sample is N samples).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from attacks.seen.adversary import Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.view import Message, View
from noise.params import MAX_RANK, MAX_RING_DEGREE, PARAMETERS
from wire.errors import VeilbaseError
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import FULL_BITS

MODULUS = 1 << 32
SMALL = 1 << 24
"""Numbers below this bound count as unmasked. Encoded activations and gradients stay below 2^20 or so; a number that is
uniform mod 2^32 is this small once in 128."""
MAX_DIMENSION = MAX_RANK * MAX_RING_DEGREE
MOST_SEEDS = 4
"""The most seeds of public matrices that are attacked. With the default parameters a tenant replaces its seed after
2^33 secrets, so a recording with more seeds comes from several tenants or keys."""
MOST_BYTES = 256 << 20
"""The most bytes of recorded rows, held as int64, that are attacked in one view. Rows beyond this total are left
out."""


def centred(numbers: torch.Tensor) -> torch.Tensor:
    """Maps each int64 number to the number in [−2^31, 2^31) that equals it mod 2^32."""
    return (numbers + MODULUS // 2).remainder(MODULUS) - MODULUS // 2


# ---- the public matrix ----------------------------------------------------------------------------------------------


def public_seeds(view: View) -> list[SeededRows]:
    """Returns the seed and the number of rows of each public matrix in a view, the latest first, at most `MOST_SEEDS`.

    The seeds come from requests for hints (hint: the product of a public matrix and a weight). The rows of one public
    matrix are requested in ranges, so the end of the last range is the number of rows, the dimension k·N.
    """
    dimensions: dict[bytes, int] = {}
    for message in reversed(view.with_tensors().select("hint")):
        payload = message.request().numpy().tobytes()
        try:
            rows = SeededRows.unpack(payload)
        except VeilbaseError:
            continue  # this payload is not that of a hint
        if len(dimensions) < MOST_SEEDS or rows.seed in dimensions:
            dimensions[rows.seed] = max(dimensions.get(rows.seed, 0), rows.first_row + rows.num_rows)
    return [SeededRows(seed, 0, rows) for seed, rows in dimensions.items() if 2 <= rows <= MAX_DIMENSION]


def ring_degrees(dimension: int) -> list[int]:
    """Returns the possible ring degrees N for a dimension k·N (k polynomials of N coefficients): that of the shipped
    parameter set with this dimension, or without such a set every power of two that the scheme allows."""
    shipped = [chosen.ring_degree for chosen in PARAMETERS.values() if chosen.dimension == dimension]
    powers = [1 << log for log in range(MAX_RING_DEGREE.bit_length() - 1, 0, -1)]
    return shipped[:1] or [n for n in powers if dimension % n == 0 and dimension // n <= MAX_RANK]


@dataclass(frozen=True)
class PublicMatrix:
    """Holds the public matrix A for one ring degree and number of features.

    Attributes:
        matrix: int64, shape (k·N, features); row i·N + j holds coefficient j of polynomial i.
        degree: N, the ring degree.
    """

    matrix: torch.Tensor
    degree: int

    @classmethod
    def of(cls, seed: SeededRows, degree: int, features: int) -> PublicMatrix:
        """Returns the public matrix that wire/ring/seeded_rows.py expands from a seed."""
        return cls(seed.expand(features).to(torch.int64), degree)

    @property
    def dimension(self) -> int:
        """Returns k·N, the number of unknowns of a block."""
        return self.matrix.shape[0]

    def equations(self, offset: int) -> torch.Tensor:
        """Returns the matrix M of the row at this offset, whose mask is M·s + e mod 2^32.

        Args:
            offset: how far the row is from the row that is taken as row 0, −N < offset < N.

        Returns:
            int64, shape (features, k·N): coefficient `offset` of A_i·X^j, which is ±(coefficient offset − j of A_i).
        """
        at = offset - torch.arange(self.degree)
        sign = 1 - 2 * at.div(self.degree, rounding_mode="floor").remainder(2)  # X^N = −1
        polynomials = self.matrix.view(-1, self.degree, self.matrix.shape[1])  # (k, N, features)
        turned = polynomials[:, at.remainder(self.degree)] * sign[:, None]
        return turned.flatten(0, 1).t()

    def stacked_equations(self, num_rows: int, most: int) -> torch.Tensor:
        """Returns the equations of rows 0, 1, …: int64, shape (min(num_rows·features, most), k·N)."""
        return torch.cat([self.equations(offset) for offset in range(num_rows)])[:most]

    def mask(self, secret: torch.Tensor, offset: int) -> torch.Tensor:
        """Returns the mask of one row without its error.

        Args:
            secret: the secret in the form that gives the mask of row 0; int64, small, shape (k·N,).
            offset: as for `equations`.

        Returns:
            int64, shape (features,), centred.
        """
        return centred(self._first_row @ turned(secret.view(-1, self.degree), offset).flatten())

    @functools.cached_property
    def _first_row(self) -> torch.Tensor:
        return self.equations(0)


def turned(polynomials: torch.Tensor, places: int) -> torch.Tensor:
    """Multiplies each polynomial by X^-places, −N < places < N. Coefficients that are shifted out on one side come back
    negated on the other side."""
    if places < 0:
        return -turned(polynomials, places + polynomials.shape[1])  # X^N = −1
    return torch.cat((polynomials[:, places:], -polynomials[:, :places]), dim=1)


# ---- recorded rows --------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """Holds the int32 rows of one group (layers that read the same input) and direction, in the order of the recording.
    In `rows`, blocks (a block is the rows under one secret) follow one another.

    Attributes:
        rows: int64, shape (num_rows, features).
        spans: for each message, its seq, the index of its first row, and the index after its last row.
        known: maps the index of a row to the row's plaintext x̃; if the mapping is empty, any row may be tried as zero.
        opened: the unmasked rows, int64, the shape of `rows`; meaningful for rows in `is_open`.
        is_open: bool, shape (num_rows,): the rows that were unmasked.
        is_done: bool, shape (num_rows,): the rows that were unmasked since `restart` and need no further attempt.
    """

    rows: torch.Tensor = field(repr=False)
    spans: list[tuple[int, int, int]]
    known: dict[int, torch.Tensor] = field(repr=False)
    opened: torch.Tensor = field(repr=False)
    is_open: torch.Tensor = field(repr=False)
    is_done: torch.Tensor = field(repr=False)

    @property
    def num_features(self) -> int:
        """Returns the number of features of a row."""
        return self.rows.shape[1]

    def restart(self) -> None:
        """Marks all rows as not done, so that they are tried again with another ring degree N or seed. A wrong N may
        unmask only a part of a block. That part is correct, but the rest must be tried again."""
        self.is_done[:] = False

    def windows(self, num_rows: int) -> list[int]:
        """Returns the index of the first row of each run of `num_rows` rows to try. Each run lies within one message. A
        run that contains a row that is done is left out, and if any rows are known, so is a run with an unknown row.

        Runs at the beginning of a message come first. They are likely to be zero, because positions before the answer
        have no label and so a gradient of zero.
        """
        starts, is_done = [], self.is_done.tolist()
        for _, first, stop in self.spans:
            for start in range(first, stop - num_rows + 1):
                run = range(start, start + num_rows)
                usable = not self.known or all(row in self.known for row in run)
                if usable and not any(is_done[start : start + num_rows]):
                    starts.append((start - first, start))
        return [start for _, start in sorted(starts)]

    def masks(self, start: int, num_rows: int, most: int) -> torch.Tensor:
        """Returns a run's rows minus their known plaintext, or minus zeros if no plaintext is known: the guess of their
        mask, int64, shape (at most `most`,)."""
        parts = [self.rows[row] - self.known.get(row, 0) for row in range(start, start + num_rows)]
        return centred(torch.cat(parts)[:most])

    def open_around(self, public: PublicMatrix, secret: torch.Tensor, at: int, num_tried: int) -> bool:
        """Unmasks row `at` and up to N − 1 rows after and before it, in each direction until a result is not small.

        A small result (below `SMALL`) shows that the secret is correct. The result is kept only if there are more small
        rows than the `num_tried` rows from which the secret was computed. This detects a wrong ring degree N. The
        equations of a single row are the same for every N, up to the order and the signs of the secret, so a wrong N
        shows only in the next row.

        Args:
            public: the matrix A.
            secret: the secret, in the form in which it gives the mask of row `at`.
            at: the first of the rows from which the secret was computed.
            num_tried: the number of these rows.

        Returns:
            Whether the rows were unmasked and kept.
        """
        rows: dict[int, torch.Tensor] = {}
        for step in (1, -1):
            offset = 0 if step == 1 else -1
            while abs(offset) < public.degree and 0 <= at + offset < len(self.rows):
                row = centred(self.rows[at + offset] - public.mask(secret, offset))
                if int(row.abs().max()) >= SMALL:
                    break
                rows[at + offset] = row
                offset += step
        if len(rows) <= num_tried:
            return False
        for place, row in rows.items():
            self.opened[place], self.is_open[place], self.is_done[place] = row, True, True
        return True

    def claims(self) -> list[Claim]:
        """Claims the unmasked rows of each message, if all rows of the message were unmasked."""
        return [
            StolenRows(seq, self.opened[first:stop].to(torch.float64))
            for seq, first, stop in self.spans
            if stop > first and bool(self.is_open[first:stop].all())
        ]


def streams(
    view: View, opened: Opened | None = None, forward_first: bool = False, only_whole: bool = False
) -> Iterator[Stream]:
    """Yields the rows to attack, one `Stream` for each group and direction. Gradients and groups with high ids
    come first, because the gradients of these groups are zero at positions without a label.

    Args:
        view: the view of one tenant.
        opened: rows that are known already; if given, only groups and directions with such rows are yielded.
        forward_first: whether the order is reversed, for attacks that need the same rows twice: groups with low ids
            receive them whenever a prompt is repeated.
        only_whole: whether messages are left out whose numbers were rounded, for attacks that solve the lowest bits.
            What rounding leaves has an error of its own there.
    """
    by_place: dict[tuple[str, int], list[Message]] = {}
    for message in view.with_tensors().products():
        if message.arithmetic == "ring" and (message.bits == FULL_BITS or not only_whole):
            by_place.setdefault((message.direction, message.group), []).append(message)
    left = MOST_BYTES
    order = sorted(((d != "backward", -g), (d, g)) for d, g in by_place)
    for _, group in reversed(order) if forward_first else order:
        made = _stream(by_place[group], opened or {}, left)
        if made is not None:
            left -= made.rows.numel() * 8
            yield made


def ring_request(message: Message) -> torch.Tensor | None:
    """Returns the rows of a message's request; None if they are not int32 or if there are none.

    Raises:
        ConfigurationError: the rows cannot be read.
    """
    rows = message.request()
    return rows if rows.dtype == torch.int32 and rows.numel() else None


def _stream(messages: list[Message], opened: Opened, most_bytes: int) -> Stream | None:
    parts: list[torch.Tensor] = []
    spans: list[tuple[int, int, int]] = []
    known: dict[int, torch.Tensor] = {}
    first = 0
    for message in messages:
        rows = ring_request(message)
        if rows is None or (parts and rows.shape[1] != parts[0].shape[1]):
            continue
        stop = first + rows.shape[0]
        if stop * rows.shape[1] * 8 > most_bytes:
            break
        plain = opened.get(message.seq)
        if plain is not None and plain.shape == rows.shape:
            known.update(zip(range(first, stop), plain.round().to(torch.int64), strict=True))
        parts.append(rows.to(torch.int64))
        spans.append((message.seq, first, stop))
        first = stop
    if not parts or (opened and not known):
        return None
    rows = torch.cat(parts)
    nothing = torch.zeros(len(rows), dtype=torch.bool)
    return Stream(rows, spans, known, torch.zeros_like(rows), nothing, nothing.clone())
