"""This module sends the rows of a layer group to a provider under a mask, and receives the products, for the forward
and the backward pass. Groups that the tenant keeps (tenant_sdk/model/kept.py) are computed here, and not sent.

Guarantees: after a reply that failed its check nothing is sent, and every call in every thread ends with the same
`VerificationFailed`. The choice of calls does not depend on values, except that a run may end at a value that is not
finite where tenant_sdk/model/run_state.py allows it. Executors cannot be pickled, because a mask scheme holds secrets.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from noise import staging
from noise.masks.off import Off
from noise.registry import product_calls
from noise.scheme import GroupSpec, Masked, MaskScheme
from noise.verify import FAILED, Verifier
from tenant_sdk.model.kept import KeptWeights
from tenant_sdk.model.run_state import NO_MODEL, RunState, RunStates
from wire.errors import InvalidTensor, NotFinite, VerificationFailed
from wire.frame import ITEM_BYTES, Arithmetic, Call, Direction, Purpose
from wire.limits import Limits
from wire.payload import Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import SEED_BYTES, SeededRows
from wire.ring.widths import rounded
from wire.transport.connection import Connection, Pending

_Asked = tuple[Masked, list[Pending]]
"""The type of a call whose messages have been sent: its masked rows, and its pending replies."""


def most_rows(widths: tuple[int, int], limits: Limits) -> int:
    """Returns the most rows of one request, at least 1; more rows are sent in several requests.

    Args:
        widths: the columns of a request and of its reply.
        limits: the provider's limits.
    """
    both, widest = sum(widths) * ITEM_BYTES, max(widths) * ITEM_BYTES
    return max(1, min(limits.max_rows, limits.max_tensor_bytes // widest, limits.max_in_flight_bytes // both))


class RemoteExecutor:
    """Sends masked rows to the provider (or providers) and unmasks the replies."""

    def __init__(
        self, connections: Sequence[Connection], scheme: MaskScheme, limits: Limits, verifier: Verifier | None = None,
        kept: KeptWeights | None = None,
    ) -> None:  # fmt: skip
        """Makes an executor for one session.

        Args:
            connections: one connection to each provider, in the order of the client's URLs.
            scheme: the mask.
            limits: the limits on requests, each the smallest that any of the providers states.
            verifier: the verifier of every reply, which checks it before it is unmasked; None without `verify`.
            kept: the weights of the groups that are computed here; None if all are asked for.
        """
        self._connections = tuple(connections)
        self.scheme = scheme
        self.kept = kept or KeptWeights()
        self._unmasked_here = Off(self.kept.arithmetic)
        self._limits = limits
        self._verifier = verifier
        scheme.bind(lambda call, payload, reply_cols: self._send(call, payload, 0, reply_cols))

    @contextlib.contextmanager
    def in_session(self) -> Iterator[None]:
        """Returns a context in which errors after a failed check are replaced by `VerificationFailed`.

        A failed check closes masks and connections. Their errors about being closed would hide the reason.

        Raises:
            VerificationFailed: a check has failed, before or inside the context, in this or in another thread.
        """
        self._check_honest()
        try:
            yield
        except Exception:  # the session may have been closed meanwhile
            self._check_honest()
            raise

    def _check_honest(self) -> None:
        """Raises VerificationFailed if a check has failed; only the verifier records failed checks."""
        if self._verifier is not None and self._verifier.failed:
            raise VerificationFailed(FAILED) from None  # the current exception may hold rows

    def run_states(self) -> RunStates:
        """Returns new run states, for one model."""
        return RunStates(may_stop=self._verifier is not None)

    def run(
        self, group: GroupSpec, direction: Direction, rows: torch.Tensor, states: RunStates = NO_MODEL
    ) -> torch.Tensor:
        """Returns the product of rows and a layer group's weight, which the provider computes from masked rows.

        Args:
            group: the group whose weight is used.
            direction: FORWARD or BACKWARD.
            rows: shape (num_rows, request columns), any float dtype and device.
            states: the model's run states; this thread's says what becomes of values that are not finite.

        Returns:
            float32, shape (num_rows, reply columns), on the rows' device; with the bias if the provider adds it. Zeros
            in a run that continues with zeros.

        Raises:
            VeilbaseError: the product could not be computed or failed its check.
        """
        if torch.is_autocast_enabled(rows.device.type):
            with torch.autocast(rows.device.type, enabled=False):
                return self.run(group, direction, rows, states)
        rows = rows.to(torch.float32)
        request_cols, reply_cols = group.widths(direction)
        if rows.shape[1] != request_cols:
            raise InvalidTensor(f"this layer takes {request_cols} features, got {rows.shape[1]}")
        states.before_call()
        state = states.current
        self._check_honest()
        try:  # this is what `in_session` does, without the cost of a context manager in each call
            if rows.shape[0] == 0:
                return torch.empty(0, reply_cols, dtype=torch.float32, device=rows.device)
            is_short = rows.shape[0] == 1 and not staging.is_here(rows) and group.id not in self.kept.groups
            if is_short and self.scheme.arithmetic is Arithmetic.RING:
                # A row's product on the CPU takes the short way of `RowEncoder`; no kernel of a device is started.
                with staging.on_host(rows) as here:
                    product = self._unmasked(self._ask(self.scheme, group, direction, here, state), here).to(
                        rows.device
                    )
            else:
                product = self._unmasked(self._ask(self.scheme, group, direction, rows, state), rows)
            return state.product_of(rows, product)
        except Exception:
            self._check_honest()
            raise

    def run_together(
        self, calls: Sequence[tuple[GroupSpec, torch.Tensor]], states: RunStates = NO_MODEL
    ) -> list[torch.Tensor]:
        """Returns the forward products of several groups, each as `run` returns it. All calls are sent before the first
        reply is waited for, so that a provider far away delays them only once.

        Args:
            calls: the groups, each with its rows, as for `run`; all rows are on one device.
            states: as for `run`.

        Raises:
            VeilbaseError: a product could not be computed or failed its check.
        """
        if not calls:
            return []
        states.before_call()
        with self.in_session(), torch.autocast(calls[0][1].device.type, enabled=False):
            state = states.current
            given = [(group, rows.to(torch.float32)) for group, rows in calls]
            asked = [self._ask(self.scheme, group, Direction.FORWARD, rows, state) for group, rows in given]
            products = [self._unmasked(each, rows) for each, (_, rows) in zip(asked, given, strict=True)]
            return [state.product_of(rows, product) for product, (_, rows) in zip(products, given, strict=True)]

    def run_public(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product of rows that are public, which are sent without a mask, in the form that `run` returns.

        Args:
            group, direction, rows: as for `run`. The rows are constants, or follow from constants and from earlier
                replies to such rows alone; all are finite. tenant_sdk/kinds/products.py says what this is for.
        """
        with self.in_session(), torch.autocast(rows.device.type, enabled=False):
            rows = rows.to(torch.float32)
            unmasked = Off(self.scheme.arithmetic)
            return self._unmasked(self._ask(unmasked, group, direction, rows, NO_MODEL.current), rows)

    def exchange(self, group: GroupSpec, direction: Direction, num_rows: int) -> None:
        """Sends rows that are fresh random numbers of the operating system, in the form of this mask's rows, and waits
        for the reply, which is checked as any other and dropped. No slot of a mask is used.

        Args:
            group, direction: as for `run`.
            num_rows: the number of rows, at most `most_rows`. It must not depend on any contents.
        """
        request_cols, reply_cols = group.widths(direction)
        with self.in_session():
            waiting = []
            for call, provider in product_calls(self.scheme, group, direction):
                if call.purpose is Purpose.HINT:
                    seeded = SeededRows(os.urandom(SEED_BYTES), 0, num_rows)
                    payload: Payload = SeedPayload(seeded, request_cols)
                else:
                    drawn = bytearray(os.urandom(num_rows * request_cols * ITEM_BYTES))
                    rows = torch.frombuffer(drawn, dtype=torch.int32).view(num_rows, request_cols)
                    is_ring = call.arithmetic is Arithmetic.RING
                    payload = RowsPayload(rounded(rows, call.bits) if is_ring else rows / 2.0**31, is_masked=is_ring)
                waiting.append(self._send(call, payload, provider, reply_cols))
            for pending in waiting:
                pending.result()

    def _ask(
        self, scheme: MaskScheme, group: GroupSpec, direction: Direction, rows: torch.Tensor, state: RunState
    ) -> list[_Asked]:
        """Masks the rows of a call and sends them, in as many requests as the limits need. Rows of a kept group get no
        mask and are not sent.

        Raises:
            NotFinite: the rows are not all finite, and the run may stop; no mask slot (one row of a mask) was used.
        """
        _, reply_cols = group.widths(direction)
        most = most_rows(group.widths(direction), self._limits)
        is_kept = group.id in self.kept.groups
        if is_kept:
            scheme = self._unmasked_here
        asked: list[_Asked] = []
        for part in [rows] if rows.shape[0] <= most else rows.split(most):
            masked = None
            if not state.sends_zeros:
                try:
                    masked = scheme.mask(group, direction, part)
                except NotFinite:  # the scheme has used no slot
                    if state.may_stop:
                        raise
            if masked is None:  # here no error is being handled, which would hold the rows
                masked = scheme.mask(group, direction, state.finite_rows(part))
            if is_kept:
                here = [self.kept.pending(call, payload, part.device) for call, payload, _ in masked.messages]
                asked.append((masked, [*here]))
            else:
                asked.append((masked, [self._send(*message, reply_cols) for message in masked.messages]))
        return asked

    def _unmasked(self, asked: list[_Asked], like: torch.Tensor) -> torch.Tensor:
        """Waits for the replies, which are checked before they are used, and takes the mask's effect off them."""
        parts = []
        for masked, waiting in asked:
            replies = [pending.result() for pending in waiting]
            parts.append(masked.unmask(replies if like.is_cpu else [reply.to(like.device) for reply in replies]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _send(self, call: Call, payload: Payload, provider: int, reply_cols: int) -> Pending:
        """Sends one message, of a call or of a mask that needs an effect. Every message of a session leaves here, and
        with `verify` every reply is checked before any other code gets it."""
        self._check_honest()  # the thread that makes masks also sends here; an inproc: connection is never closed
        pending = self._connections[provider].submit(call, payload, reply_cols)
        return pending if self._verifier is None else _Checked(pending, call, payload, self)

    def check(self, call: Call, payload: Payload, reply: torch.Tensor) -> None:
        """Checks a reply against the trusted weights, and closes the session if the reply is wrong.

        Raises:
            VerificationFailed: the reply is wrong. The connections are closed, the secrets are dropped, and the session
                cannot be used again.
        """
        if self._verifier is None:
            return
        try:
            rows = payload.rows(call)
            if isinstance(rows, SeededRows):
                rows = rows.expand(payload.cols)
            self._verifier.check(call.group, call.direction, rows, reply.to("cpu"))
        except VerificationFailed:
            self.close()
            raise

    def close(self) -> None:
        """Drops secrets and closes the connections."""
        if self._verifier is not None:
            self._verifier.close()
        self.scheme.close()
        for connection in self._connections:
            connection.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteExecutor:
        """Returns this same executor, since a copied model uses the same connection."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises TypeError, so that this object is never pickled."""
        raise TypeError("a remote executor holds secrets and connections: it cannot be pickled")


@dataclass(frozen=True)
class _Checked:
    """Holds a pending reply, and verifies the reply before any other code gets it."""

    pending: Pending
    call: Call
    payload: Payload
    executor: RemoteExecutor

    def result(self) -> torch.Tensor:
        """Waits for the reply, checks the reply while it is still masked, and returns the masked reply."""
        reply = self.pending.result()
        self.executor.check(self.call, self.payload, reply)
        return reply
