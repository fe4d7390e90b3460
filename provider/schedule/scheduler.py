"""Decides which rows run next: it forms batches over tenants, and cuts large requests into pieces.

A queue holds the requests of one call; only these can share a product. A ring holds requests that may run now, and
gives the tenants turns. With a latency target, each class of work has its own ring, and urgent classes go first.

Guarantees: every row of a request that is neither cancelled nor expired is put into exactly one batch, and a request's
rows are put into batches in order. With a target, no class waits longer than its bound in Policy while the executor
computes products; without a target, all tenants take turns. Each decision looks at a bounded part of the queue. The
scheduler never sleeps and reads no clock: callers pass `now_s`. It is not safe under threads.

Sources: Symbiosis (Multi-Adapter Inference and Fine-Tuning) describes opportunistic batching and the policies compared
with it; FlexLLM describes token-level scheduling of fine-tuning under a latency target.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from provider.schedule.decoders import Decoders, note
from provider.schedule.fairness import QUANTUM_ROWS, Policy, TenantRing, turn_rows, turn_s
from provider.schedule.latency import LatencyModel
from provider.schedule.ticket import Batch, Piece, RequestClass, Ticket
from wire.frame import Call, Purpose

_ONE_RING = RequestClass.PREFILL
"""The class whose ring holds all requests that may run, if no latency target sets one class before another."""
_MAX_JOINED = 256
"""The most pieces (parts of requests) in one batch, and the most requests that are considered for a batch."""
_LEAST_ROWS = 16
"""The fewest rows in a piece of a larger request, except its last piece, since every piece reads all of its layer's
weights again."""
_STARVED_SHARE, _STARVED_PRODUCTS = 0.1, 2.0
"""The first is the share of the executor's time for a class that would otherwise wait for ever. The second is the least
time allowed for a product of such a class, as a multiple of the time of a product of one row."""
_SOON_S, _NEARLY, _UNLIMITED = 1e-4, 1 - 1e-9, float("inf")
_CALM_S = 0.01
"""The seconds that a large product may take while no decode request is expected, if its smallest piece takes longer
than the target."""


class Scheduler:
    """Holds one executor's queue of requests, and chooses the batch to compute next."""

    def __init__(
        self,
        policy: Policy,
        latency: LatencyModel,
        weight_of: Callable[[str], float] = lambda tenant: 1.0,
        width_of: Callable[[Call], int] = lambda call: 1,
    ) -> None:
        """Makes a scheduler in which no request waits.

        Args:
            policy: how requests are combined.
            latency: predicts the time of products; `computed` adds measurements to this model.
            weight_of: returns a tenant's weight: its share of the executor relative to other tenants.
            width_of: returns the larger of in_features and out_features of a call's group.
        """
        self._policy, self._latency, self._width_of = policy, latency, width_of
        self._weight_of = weight_of
        self._empty()

    def _empty(self) -> None:
        self._rings = {
            one: TenantRing(partial(turn_rows, one) if self._has_classes else self._turn_s, self._weight_of)
            for one in RequestClass
        }
        self._queues: dict[Call, dict[Ticket, None]] = {}
        self._queue_tenants: dict[Call, Counter[str]] = {}
        self._held: list[tuple[float, int, Ticket]] = []
        self._queue_held: dict[Call, dict[Ticket, None]] = {}
        """Maps a call to its requests that are held so that others may join. Other entries of `_held` are out of
        date."""
        self._arrivals = itertools.count()
        self._active: OrderedDict[str, float] = OrderedDict()
        self._queue_users: dict[Call, OrderedDict[str, float]] = {}
        self._decoders = Decoders(self._has_classes)
        self._limit_s: Callable[[float], float] | None = None
        self._owed_s, self._owed_at_s = dict.fromkeys(RequestClass, 0.0), 0.0
        self._ran: set[RequestClass] = set()
        """Classes of the requests in the newest batch that `next_batch` returned."""
        self._wake_s: float | None = None

    def _turn_s(self, num_equal: int) -> float:
        return turn_s(num_equal, self._latency.mean_base_s)

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def has_target(self) -> bool:
        """Returns whether a latency target applies, so that decode requests go before other work."""
        return self._has_classes

    def takes_decode(self, tenant: str, now_s: float, is_idle: bool) -> bool:
        """Returns whether a decode request that arrives now would be the next to run.

        Args:
            tenant: the name of the request's tenant.
            now_s: the present time in seconds.
            is_idle: whether a replica is idle; if so, a class that has waited for its longest time goes first.
        """
        if self._policy.name == "lockstep" or self._rings[self._ring_of(RequestClass.DECODE)]:
            return False
        if not self._has_classes:
            return True
        return not (self._decoders.floods(tenant, now_s) or (is_idle and self._is_anyone_owed(now_s)))

    def _is_anyone_owed(self, now_s: float) -> bool:
        """Returns whether any class has waited for its longest time; the result is valid only while no product runs."""
        since_s = self._owed_at_s
        return any(self._is_starved(one, self._owed_by(one, since_s, now_s)) for one in self._policy.starvation_s)

    def __len__(self) -> int:
        return sum(map(len, self._queue_held.values())) + sum(map(len, self._rings.values()))

    # ---- taking requests ------------------------------------------------------------------------------------------

    def add(self, ticket: Ticket, now_s: float) -> None:
        """Adds a request to the queue; sets its `due_s`, and makes it a prefill request if its tenant floods (see
        `Decoders.came`)."""
        note(self._active, ticket.tenant, now_s)
        users = self._queue_users.setdefault(ticket.call, OrderedDict())
        note(users, ticket.tenant, now_s)
        if ticket.request_class is RequestClass.DECODE:
            self._decoders.came(ticket, now_s, self._latency.predict_s(ticket.call, ticket.num_rows))
        queue = self._queues.setdefault(ticket.call, {})
        queue[ticket] = None
        tenants = self._queue_tenants.setdefault(ticket.call, Counter())
        tenants[ticket.tenant] += 1
        hold_s = self._hold_s(ticket)
        ticket.due_s = now_s + hold_s
        if hold_s <= 0:
            self._rings[self._ring_of(ticket.request_class)].add(ticket)
        else:
            self._queue_held.setdefault(ticket.call, {})[ticket] = None
            heapq.heappush(self._held, (ticket.due_s, next(self._arrivals), ticket))
        call = self._queue_in_step() if self._policy.name == "lockstep" else ticket.call
        # Once all active tenants of a queue wait in it, no other will join, so its requests are held no longer.
        if call is not None and (self._policy.name == "lockstep" or len(tenants) >= len(users)):
            for one in list(self._queue_held.get(call, ())):
                self._release(one)

    def cancel(self, ticket: Ticket) -> None:
        """Records that a request was cancelled, and drops its rows that are in no batch yet."""
        self._decoders.cancelled(ticket)
        if ticket in self._queues.get(ticket.call, {}):
            self._drop(ticket)

    def finished(self, batch: Batch, now_s: float) -> None:
        """Records that a batch has been computed or has failed."""
        for piece in batch.pieces:
            if piece.is_last:
                self._decoders.answered(piece.ticket, now_s)

    def computed_elsewhere(self, tenant: str, call: Call, began_s: float, now_s: float) -> None:
        """Records a decode request that was computed from `began_s` to `now_s` without entering the queue."""
        note(self._active, tenant, began_s)
        self._decoders.computed_elsewhere(tenant, call, began_s, now_s)

    def computed(self, batch: Batch, seconds: float) -> None:
        """Adds the measured seconds of a batch to the latency model. Callers must leave out batches of which
        some rows were not computed."""
        self._latency.measured(batch.call, batch.num_rows, seconds)

    def abandon(self) -> list[Ticket]:
        """Empties the queue and returns the tickets (requests) that were queued."""
        left = [ticket for queue in self._queues.values() for ticket in queue]
        self._empty()
        return left

    # ---- handing out batches --------------------------------------------------------------------------------------

    def next_batch(self, now_s: float) -> Batch | None:
        """Returns the batch to compute now, or None if nothing may run yet; `next_due_s` then returns when to
        call this again."""
        self._wake_s = None
        self._skip_leftovers()
        while self._held and self._held[0][0] <= now_s:
            self._release(heapq.heappop(self._held)[2])
            self._skip_leftovers()
        if self._policy.name != "opportunistic":
            ring = self._rings[_ONE_RING]
            return self._take(ring.oldest, _UNLIMITED, now_s) if ring else None
        self._owe(now_s)
        self._limit_s = self._limits(now_s)
        for request_class, is_starved in self._classes():
            head = self._rings[request_class].turn(
                lambda one, is_starved=is_starved: self._piece_cost(one, self._time_for(one, is_starved, now_s))  # type: ignore[misc]
            )
            time_s = self._time_for(head, is_starved, now_s)
            if time_s > 0:
                return self._take(head, time_s, now_s)
        return None

    def _limits(self, now_s: float) -> Callable[[float], float] | None:
        """Returns a function that bounds the seconds of a large product while decode requests are expected; None if
        no decode request is expected or there is no target.

        The function's argument is the time of a product of one row. Its result is the time until the next decode
        request, plus the time for which the target allows decode requests to wait. This also sets `_wake_s`, the time
        to call `next_batch` again if the bound is too short for any product.
        """
        slo_s = self._policy.slo_s
        if slo_s is None or not self._decoders.are_active(now_s):
            return None
        expected_s, again_s, num_expected = self._decoders.next_s(now_s)
        if not num_expected:
            return None
        owed_soon_s = [
            now_s + max((_STARVED_SHARE * bound_s - self._owed_s[one]) / _STARVED_SHARE, _SOON_S)
            for one, bound_s in self._policy.starvation_s.items()
            if self._rings[one]
        ]
        self._wake_s = min([again_s, *owed_soon_s])
        # All expected decode requests may come at once and then wait for each other.
        return lambda one_s: max(0.0, slo_s - num_expected * one_s) + max(0.0, expected_s - now_s)

    def _time_for(self, ticket: Ticket, is_starved: bool, now_s: float) -> float:
        """Returns the seconds that a product which begins with this request may take: 0 if it may not run yet, infinity
        if there is no bound."""
        if not self._decoders.are_active(now_s) or (self._has_classes and ticket.request_class is RequestClass.DECODE):
            return _UNLIMITED
        one_s = self._latency.predict_s(ticket.call, 1)
        # The time of the smallest piece that is worth computing.
        least_s = self._latency.predict_s(ticket.call, min(ticket.rows_left, _LEAST_ROWS))
        if self._limit_s is not None:
            time_s = self._limit_s(one_s)
            if time_s >= least_s:
                return time_s
            return max(self._owed_s[ticket.request_class], _STARVED_PRODUCTS * one_s, least_s) if is_starved else 0.0
        if self._policy.slo_s is None:
            return max(self._rings[_ONE_RING].quantum, _STARVED_PRODUCTS * one_s, least_s)
        if self._policy.slo_s - one_s >= least_s:
            # No decode request is expected. If one comes anyway, it waits for one product, within the target.
            return self._policy.slo_s - one_s
        return max(_CALM_S, _STARVED_PRODUCTS * one_s, least_s)

    def next_due_s(self) -> float | None:
        """Returns the time at which to call `next_batch` again if no request arrives earlier, or None if there
        is no such time."""
        self._skip_leftovers()
        due_s = self._held[0][0] if self._held else None
        if self._wake_s is None or due_s is None:
            return due_s if self._wake_s is None else self._wake_s
        return min(due_s, self._wake_s)

    def _skip_leftovers(self) -> None:
        while self._held and not self._is_held(self._held[0][2]):
            heapq.heappop(self._held)

    def _is_held(self, ticket: Ticket) -> bool:
        return ticket in self._queue_held.get(ticket.call, ())

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _hold_s(self, ticket: Ticket) -> float:
        policy = self._policy
        if policy.name == "none" or ticket.call.purpose is Purpose.HINT:
            return 0.0
        if policy.name == "lockstep":
            return policy.max_wait_s if len(self._active) > 1 else 0.0
        if ticket.request_class is RequestClass.DECODE or len(self._queue_users[ticket.call]) == 1:
            return 0.0  # No other tenant uses this layer, so none will join.
        if any(self._rings.values()):
            return 0.0  # The request waits for other requests anyway, and new ones may join meanwhile.
        return min(policy.max_wait_s, policy.wait_share * self._latency.predict_s(ticket.call, ticket.num_rows))

    @property
    def _has_classes(self) -> bool:
        """Returns whether urgent classes go first: under the policy `opportunistic` with a latency target."""
        return self._policy.name == "opportunistic" and self._policy.slo_s is not None

    def _ring_of(self, request_class: RequestClass) -> RequestClass:
        return request_class if self._has_classes else _ONE_RING

    def _classes(self) -> list[tuple[RequestClass, bool]]:
        """Returns the classes that have requests to run, in the order to run them. With each class it returns whether
        the class is starved, that is, has waited for its longest time and so goes first."""
        ready = [one for one in RequestClass if self._rings[one]]
        bounds = self._policy.starvation_s
        starved = [one for one in ready if one in bounds and self._is_starved(one, self._owed_s[one])]
        return [(one, True) for one in starved] + [(one, False) for one in ready if one not in starved]

    def _owe(self, now_s: float) -> None:
        """Updates the seconds of executor time that are owed to each class that waited while other classes ran."""
        since_s, self._owed_at_s = self._owed_at_s, now_s
        ran, self._ran = self._ran, set()
        for one in self._policy.starvation_s:
            if one not in ran or not self._rings[one]:
                self._owed_s[one] = self._owed_by(one, since_s, now_s)

    def _owed_by(self, one: RequestClass, since_s: float, now_s: float) -> float:
        """Returns the seconds of executor time owed to a class at `now_s`, or 0 if the class has no request to run.

        These are the seconds owed before, plus the share `_STARVED_SHARE` of the seconds that the class waited since
        `since_s`. The sum is capped at the same share of the class's longest allowed wait.
        """
        if not self._rings[one]:
            return 0.0
        waited_s = max(0.0, now_s - max(since_s, self._rings[one].oldest.arrived_s))
        most_s = _STARVED_SHARE * self._policy.starvation_s[one]
        return min(self._owed_s[one] + _STARVED_SHARE * waited_s, most_s)

    def _is_starved(self, one: RequestClass, owed_s: float) -> bool:
        return owed_s >= _STARVED_SHARE * self._policy.starvation_s[one] * _NEARLY

    def _piece_cost(self, ticket: Ticket, time_s: float) -> float:
        """Returns the cost of a request's next piece if the piece's product may take at most `time_s` seconds."""
        return self._cost(ticket.call, min(ticket.rows_left, self._room(ticket, time_s)))

    def _cost(self, call: Call, num_rows: int, is_joined: bool = False) -> float:
        """Returns what a tenant pays for rows: their number if there is a latency target, else their seconds.

        The tenant whose request begins a product also pays for the product's base time, so that small products are not
        free. Tenants that join the product pay for their rows only.
        """
        if self._has_classes:
            return num_rows
        base_s = self._latency.predict_s(call, 0) if is_joined else 0.0
        return self._latency.predict_s(call, num_rows) - base_s

    def _room(self, head: Ticket, time_s: float) -> int:
        """Returns the largest number of rows that a batch whose first request is `head` may have.

        With opportunistic batching the batch should take at most `time_s` seconds, but `_LEAST_ROWS` rows are always
        allowed, and a decode request, if classes are told apart, has all of its rows. Other policies ignore `time_s`.
        """
        whole = head.rows_left
        if self._policy.name != "opportunistic":
            return max(whole, self._most_rows(head.call))
        if head.request_class is RequestClass.DECODE and self._has_classes:
            return whole
        if time_s == _UNLIMITED:
            return self._most_rows(head.call)
        return min(self._most_rows(head.call), max(_LEAST_ROWS, self._latency.rows_within(head.call, time_s)))

    def _most_rows(self, call: Call) -> int:
        return max(1, min(self._policy.max_batch_rows, self._policy.max_batch_numbers // self._width_of(call)))

    def _room_for_company(self, head: Ticket, now_s: float) -> int:
        """Returns the most rows of a batch that begins with the decode request `head` and meets the latency target."""
        limit_s = head.arrived_s + (self._policy.slo_s or 0.0) - now_s
        return min(self._most_rows(head.call), self._latency.rows_within(head.call, limit_s))

    # ---- taking rows ----------------------------------------------------------------------------------------------

    def _take(self, head: Ticket, time_s: float, now_s: float) -> Batch:
        room = self._room(head, time_s)
        pieces = [self._take_piece(head, min(head.rows_left, room))]
        if self._policy.name != "none" and head.call.purpose is not Purpose.HINT:
            is_decode = head.request_class is RequestClass.DECODE and self._has_classes
            queue = self._queues.get(head.call, {})
            company = [one for one in itertools.islice(queue, _MAX_JOINED) if one is not head]
            if is_decode:
                company, large = _split_by_class(company)
                self._join(pieces, company, self._most_rows(head.call))
                self._join(pieces, large, self._room_for_company(head, now_s))
            else:
                self._join(pieces, company, room)
        return Batch(head.call, tuple(pieces))

    def _join(self, pieces: list[Piece], company: list[Ticket], room: int) -> None:
        room -= sum(piece.num_rows for piece in pieces)
        whole = self._policy.name != "opportunistic"
        shares = Counter({piece.ticket.tenant: piece.num_rows for piece in pieces})
        for ticket in company:
            if room <= 0 or len(pieces) >= _MAX_JOINED:
                return
            is_decode = ticket.request_class is RequestClass.DECODE
            if ticket.rows_left > room and (whole or is_decode):
                continue
            if is_decode and self._has_classes and shares[ticket.tenant] >= QUANTUM_ROWS[RequestClass.DECODE]:
                continue  # One tenant's many small requests must not lengthen every tenant's product.
            if not (whole or self._has_classes or self._rings[_ONE_RING].may_join(ticket.tenant)):
                continue
            shares[ticket.tenant] += ticket.rows_left
            pieces.append(self._take_piece(ticket, min(ticket.rows_left, room), is_joined=True))
            room -= pieces[-1].num_rows

    def _take_piece(self, ticket: Ticket, num_rows: int, is_joined: bool = False) -> Piece:
        if self._is_held(ticket):
            self._release(ticket)
        piece = Piece(ticket, ticket.rows_taken, num_rows)
        ticket.rows_taken += num_rows
        self._rings[self._ring_of(ticket.request_class)].charge(ticket, self._cost(ticket.call, num_rows, is_joined))
        self._ran.add(ticket.request_class)
        owed_s = self._owed_s[ticket.request_class] - self._latency.predict_s(ticket.call, num_rows)
        self._owed_s[ticket.request_class] = max(0.0, owed_s)
        if ticket.rows_left == 0:
            self._drop(ticket)
        return piece

    def _queue_in_step(self) -> Call | None:
        """Under `lockstep`, returns the call in which most tenants wait, if all active tenants wait; otherwise returns
        None.

        The tenants in other queues wait until the chosen queue's tenants reach the same layer, so that soon all tenants
        are at one layer. If several queues have equally many tenants, the newest queue runs, and its tenants advance
        until they reach a layer at which others wait. If the oldest queue ran, the queues' tenants would never meet.
        """
        num_waiting = sum(map(len, self._queue_tenants.values()))
        if num_waiting < len(self._active) or any(self._rings.values()):  # Requests in a ring run first.
            return None
        return max(reversed(self._queue_tenants), key=lambda call: len(self._queue_tenants[call]))

    def _release(self, ticket: Ticket) -> None:
        """Stops holding a request for others to share its product, so that the request may run now."""
        self._let_go(ticket)
        self._rings[self._ring_of(ticket.request_class)].add(ticket)

    def _let_go(self, ticket: Ticket) -> None:
        held = self._queue_held[ticket.call]
        del held[ticket]
        if not held:
            del self._queue_held[ticket.call]

    def _drop(self, ticket: Ticket) -> None:
        if self._is_held(ticket):
            self._let_go(ticket)
        else:
            self._rings[self._ring_of(ticket.request_class)].remove(ticket)
        self._decoders.left_queue(ticket)
        queue, tenants = self._queues[ticket.call], self._queue_tenants[ticket.call]
        del queue[ticket]
        tenants[ticket.tenant] -= 1
        if not tenants[ticket.tenant]:
            del tenants[ticket.tenant]
        if not queue:
            del self._queues[ticket.call], self._queue_tenants[ticket.call]


def _split_by_class(tickets: list[Ticket]) -> tuple[list[Ticket], list[Ticket]]:
    decode = [one for one in tickets if one.request_class is RequestClass.DECODE]
    return decode, [one for one in tickets if one.request_class is not RequestClass.DECODE]
