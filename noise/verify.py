"""This module checks every ring reply against secret projections of the trusted weights (Freivalds), before the reply
is unmasked.

Guarantees: a reply with at least one wrong number, in any number of rows, passes with probability at most 2^-κ. After
the first failure nothing passes and the secrets are dropped. The weights themselves are not kept. This module does not
guarantee which weights are trusted; tenant_sdk/trust/checkpoint.py decides that.

Let R be a secret binary matrix of shape (reply features × κ+1) and V = W̃·R, for the int8 weight W̃ (its transpose in
the backward direction). A reply r to the rows z must satisfy r·R ≡ z·V mod 2^32. If r differs from z·W̃, let 2^v be
the largest power of two that divides all differences in a wrong row. The product of these differences and a binary
column of R is 0 mod 2^32 with probability at most a half, even for v = 31. A column that is uniform mod 2^32 would be
no better there, since it would also miss the error half the time.

If there are many rows and the machine multiplies bytes fast, the rows are first folded with a second secret binary
matrix S, of shape (κ+1 × rows). Folding misses an error with probability at most 2^-(κ+1) by the same argument, so an
error passes both steps with probability at most 2^-κ. An honest provider is never refused, so R and S can serve a whole
session: the only thing that a forger ever learns is the failure that ends the session.

Source: Freivalds, 1977; Tramèr and Boneh, "Slalom", ICLR 2019, section 3.2. docs/decisions/0005-verification.md has the
reasons, and says why rows are folded.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import numpy as np
import torch

from wire.errors import ConfigurationError, InvalidTensor, VerificationFailed
from wire.frame import Direction
from wire.ring import coding, product_cuda
from wire.ring.product import int_mm_is_fast

FAILED = "an answer of the provider is not what the trusted checkpoint gives: this session is over"
"""The one sentence for every failure, whatever was wrong, so that a forger learns nothing from a difference between
sentences."""

_FOLD_FROM = 160
"""The number of rows from which folding costs less than projecting each row; measured in
docs/decisions/0005-verification.md."""
_FOLD_ROWS = 1024
"""The most rows folded together. Each row has its own column of S, so that no forger can make the differences of two
rows cancel."""
_WEIGHT_ROWS = 1024
"""Rows of W̃ projected at a time, which bounds the size of their int32 copy."""
_SIGN_BITS = -0x7F7F7F80
"""0x80808080 as int32: xor with this number turns each byte u into the signed byte u − 128."""
_BYTE_VALUES = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24], dtype=torch.int32, device="cpu")


@dataclass(frozen=True)
class _Projection:
    """Holds the secrets of one group and direction.

    Attributes:
        inputs, outputs: the columns of a request and of its reply.
        outer: R, int8 of zeros and ones, shape (outputs, columns).
        inner: V = W̃·R, each number split into signed bytes (limbs) that are stored side by side: int8, shape (inputs,
            limbs · columns).
    """

    inputs: int
    outputs: int
    outer: torch.Tensor = field(repr=False)
    inner: torch.Tensor = field(repr=False)

    def fits(self, rows: torch.Tensor, reply: torch.Tensor) -> bool:
        """Tells whether r·R ≡ z·V mod 2^32 for every row and column."""
        columns = self.outer.shape[1]
        return torch.equal(coding.product(reply, self.outer), _join(coding.product(rows, self.inner), columns))


class Verifier:
    """Holds secret projections of the trusted weights of all groups of one session, and checks replies against them. It
    is safe under threads, and cannot be pickled or copied.

    For a group with a weight of shape (d × m) it takes (d + m) · (1 + limbs) · (κ+1) bytes of memory, for both
    directions; `limbs` is 2 or 3 for real weights. At κ = 40 that is 30 MB for SmolLM2-135M and 0.3 GB for a 7B model.
    """

    _kappas: ClassVar[range] = range(40, 65)
    """The accepted values of κ. Below 40 a forger has a realistic chance. Above 64 the check takes more time without a
    benefit. Tests of the probability use smaller values."""

    def __init__(self, kappa: int = 40) -> None:
        """Makes a verifier that knows no group yet. It draws the secret matrix S, with which rows are folded.

        Args:
            kappa: κ, 40 to 64; a forged reply passes with probability at most 2^-κ.

        Raises:
            ConfigurationError: kappa is any other number.
        """
        if kappa not in self._kappas:
            raise ConfigurationError(f"kappa is {self._kappas[0]} to {self._kappas[-1]}, got {kappa!r}")
        self.kappa = kappa
        self._projections: dict[tuple[int, Direction], _Projection] = {}
        self._fold: torch.Tensor | None = _random_bits(kappa + 1, _FOLD_ROWS).view(torch.uint8)
        self._lock = threading.Lock()
        self._failed = self._closed = False
        _VERIFIERS.add(self)

    @property
    def failed(self) -> bool:
        """Tells whether a check has failed. After one failure every later check fails too."""
        return self._failed

    def add_group(self, group_id: int, quantised: torch.Tensor) -> None:
        """Draws the secrets of a group, for both directions. The weight is not kept.

        Args:
            group_id: the group's number in the manifest.
            quantised: W̃ of the trusted checkpoint, int8, shape (in_features, out_features), CPU.

        Raises:
            InvalidTensor: `quantised` is not such a matrix.
            ConfigurationError: the group was added before, or the verifier is closed.
            VerificationFailed: a check has failed already.
        """
        if quantised.dtype != torch.int8 or quantised.dim() != 2 or not quantised.numel():
            raise InvalidTensor(f"expected an int8 matrix, got {quantised.dtype} of {quantised.dim()} dimensions")
        made = {
            (group_id, Direction.FORWARD): _project(quantised, self.kappa + 1),
            (group_id, Direction.BACKWARD): _project(quantised.t(), self.kappa + 1),
        }
        with self._lock:
            self._check_usable()
            if made.keys() & self._projections.keys():
                raise ConfigurationError(f"group {group_id} was added to this verifier before")
            self._projections.update(made)

    def check(self, group_id: int, direction: Direction, rows: torch.Tensor, reply: torch.Tensor) -> None:
        """Checks one reply, which is still masked. Returns if the reply passes; otherwise raises, and every later check
        fails too.

        Args:
            group_id, direction: those of the call, whose purpose is PRODUCT, EFFECT or HINT.
            rows: the rows that were sent (for a HINT: the expanded rows), int32, shape (num_rows, request features).
            reply: int32, shape (num_rows, reply features).

        Raises:
            VerificationFailed: a number, a shape or a type is wrong, or the group is unknown; the sentence is always
                the same.
            ConfigurationError: the verifier is closed.
        """
        self._check_usable()
        projection, fold = self._projections.get((group_id, direction)), self._fold
        if projection is None or fold is None or not _shapes_fit(projection, rows, reply):
            self._check_usable()  # Another thread may have closed this verifier meanwhile, which is no forgery.
            self._fail()
        if not _all_fit(projection, fold, rows.cpu(), reply.cpu()):
            self._fail()
        self._check_usable()  # Another thread may have found a forgery meanwhile.

    def close(self) -> None:
        """Drops the secrets of the checks. The verifier cannot be used after that."""
        self._closed = True
        self._drop()

    def _check_usable(self) -> None:
        if self._failed:
            raise VerificationFailed(FAILED)
        if self._closed:
            raise ConfigurationError("this session's verifier was closed")

    def _fail(self) -> NoReturn:
        self._failed = True
        self._drop()
        raise VerificationFailed(FAILED)

    def _drop(self) -> None:
        # The secrets are not overwritten: a check in another thread would find zeros on both sides, and accept.
        with self._lock:
            self._projections = {}
            self._fold = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a verifier holds secrets: it cannot be pickled")


_VERIFIERS: weakref.WeakSet[Verifier] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for verifier in list(_VERIFIERS):
        verifier._lock = threading.Lock()  # The thread that held the old lock is not in this process.


os.register_at_fork(after_in_child=_after_fork_in_child)


def _shapes_fit(projection: _Projection, rows: torch.Tensor, reply: torch.Tensor) -> bool:
    return (
        rows.dtype == reply.dtype == torch.int32
        and rows.dim() == reply.dim() == 2
        and tuple(rows.shape) == (reply.shape[0], projection.inputs)
        and reply.shape[1] == projection.outputs
    )


def _all_fit(projection: _Projection, fold: torch.Tensor, rows: torch.Tensor, reply: torch.Tensor) -> bool:
    """Tells whether all rows of a reply pass, checking `_FOLD_ROWS` rows at a time. Fewer than `_FOLD_FROM` rows are
    not folded.

    Nothing is folded if `torch._int_mm` is slow: folding in float64 costs more than it saves.
    """
    from_rows = _FOLD_FROM if int_mm_is_fast() else _FOLD_ROWS + 1
    parts = zip(rows.split(_FOLD_ROWS), reply.split(_FOLD_ROWS), strict=True)
    return all(
        projection.fits(sent, came)
        if sent.shape[0] < from_rows
        else projection.fits(_folded(fold, sent), _folded(fold, came))
        for sent, came in parts
    )


def _folded(fold: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns S·rows mod 2^32 for the secret matrix S, by `torch._int_mm`. Callers must know that `torch._int_mm` is
    exact on this machine (`int_mm_is_fast`).

    Args:
        fold: S, uint8 of zeros and ones, shape (num_folds, at least num_rows).
        rows: int32, shape (num_rows, features).

    Returns:
        int32, shape (num_folds, features).
    """
    num_rows, features = rows.shape
    fold = fold[:, :num_rows].contiguous()
    # The four bytes of a number stay side by side: as the second operand they need no copy, only an offset of 128.
    limbs = torch.bitwise_xor(rows.contiguous(), _SIGN_BITS).view(torch.int8)  # (num_rows, 4 · features)
    parts = product_cuda.multiply(fold, limbs)
    total: torch.Tensor = (parts.view(-1, 4) @ _BYTE_VALUES).view(-1, features)  # The numbers wrap mod 2^32.
    # In each byte Σ S·u = Σ S·(u − 128) + 128·ΣS, so 0x80808080·ΣS must be added to each number.
    offset = coding.to_int32(fold.sum(dim=1, keepdim=True, dtype=torch.int64) * _SIGN_BITS)
    return total.add_(offset)


def _project(quantised: torch.Tensor, columns: int) -> _Projection:
    """Draws R and computes W̃·R. No number of the product overflows int32, since 127 · MAX_FEATURES < 2^29."""
    inputs, outputs = quantised.shape
    outer = _random_bits(outputs, columns)
    parts = [coding.product(part.to(torch.int32), outer) for part in quantised.split(_WEIGHT_ROWS)]
    return _Projection(inputs, outputs, outer, _balanced_limbs(torch.cat(parts)))


def _balanced_limbs(values: torch.Tensor) -> torch.Tensor:
    """Splits int32 numbers below 2^30 in size into signed bytes (limbs). Returns int8, shape (rows, limbs · columns):
    all columns of the lowest limb first.

    There are as many limbs as the largest number needs. This count seldom depends on the secret R, and shows in nothing
    but the tenant's own computing time.
    """
    limbs: list[torch.Tensor] = []
    while not limbs or bool(values.any()):
        low = ((values + 128) & 0xFF) - 128
        limbs.append(low.to(torch.int8))
        values = (values - low) >> 8
    return torch.cat(limbs, dim=1)


def _join(wide: torch.Tensor, columns: int) -> torch.Tensor:
    """Combines the products with the limbs of V (blocks of `columns` columns each, lowest limb first) to the product
    with V, mod 2^32, shape (num_rows, columns)."""
    total = wide[:, :columns].contiguous()
    for index in range(1, wide.shape[1] // columns):
        total.add_(wide[:, index * columns : (index + 1) * columns], alpha=1 << (8 * index))
    return total


def _random_bits(rows: int, columns: int) -> torch.Tensor:
    """Draws zeros and ones from the operating system's CSPRNG; int8, shape (rows, columns)."""
    count = rows * columns
    drawn = np.frombuffer(os.urandom(-(-count // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(drawn, count=count).view(np.int8)).view(rows, columns)
