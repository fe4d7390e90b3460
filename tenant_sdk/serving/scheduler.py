"""This module decides which rows are computed in the next step. It is pure code: the caller passes the time, and there
are no tensors or threads.

A step has one row for every request that is being answered, so that no answer waits for another request's prompt.
With speculation it has `num_drafted` more rows for each of them, whatever is drafted. Pieces of prompts fill the rest
of the step's token budget. Requests join and leave at every step.

Guarantees:
- a request that grows reserves the memory of its keys and values (KV) in pages, as its answer grows. If the memory runs
  out, the request that was admitted last is preempted: it gives up its KV, waits before all that came later, and is
  computed again from its first token when it is admitted again. The request that was admitted first always goes on, so
  that all end;
- a request that does not grow has all its KV reserved when it is admitted, and is never preempted;
- who is preempted, and when, follows from numbers of tokens and the order of admission alone;
- a request whose adapter is still loading waits, and does not keep other requests from being admitted;
- a request of the caller with the fewest running requests is admitted first. The requests of one caller are admitted in
  the order in which they came, as far as they are ready and fit;
- smaller requests may overtake a request that does not fit for `overtaking_s` seconds. After that time, no request is
  admitted before it. Only one request at a time keeps others waiting like this. For the next request that does not
  fit, the seconds are counted from when the first was admitted or removed, so that a caller with many large requests
  does not keep other callers out;
- the oldest prompt that is being computed gets at least half of the budget for prompts, so that it is always completed.
  The shortest prompts get the rest first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from tenant_sdk.plain_values import WrongOption, positive, seconds
from wire.errors import ConfigurationError

PAGE_TOKENS = 16
"""The tokens of a page, the unit in which the KV of a request grows."""
_GROWTH = 8
"""A request with many pages grows by an eighth of them at a time. KV is copied when it grows (kv.py), and so each token
is copied about eight times in all, however long the request is."""


def reserved_tokens(num_tokens: int) -> int:
    """Returns the number of tokens for which a request that grows reserves KV when it has `num_tokens` tokens."""
    reserved = PAGE_TOKENS
    while reserved < num_tokens:
        reserved += max(reserved // _GROWTH // PAGE_TOKENS, 1) * PAGE_TOKENS
    return reserved


class Adapter(Protocol):
    """Defines what the scheduler needs to know about a request's adapter."""

    def is_ready(self) -> bool:
        """Returns whether the adapter is on the device, so that `adapter_index` is valid."""

    @property
    def adapter_index(self) -> int:
        """Returns the adapter index, the number of the adapter's place on the device; 0 means no adapter."""


@dataclass(frozen=True)
class Segment:
    """Describes the rows of one request in a step.

    Attributes:
        request: the request's number.
        start, stop: the range of the request's tokens that are computed, `stop` excluded. They are counted from the
            start of the prompt, with its padding, and on through the answer.
        adapter_index: that of the request's adapter.
        samples: whether the range ends with the last token that is known, so that its last row gives the next token.
        num_drafted: the number of further rows, which are for drafted tokens (guesses of the tokens after the range).
        kv_tokens: the number of tokens for which the request has KV reserved; it may be more than the request will ever
            have. None means all that it will ever have.
    """

    request: int
    start: int
    stop: int
    adapter_index: int
    samples: bool
    num_drafted: int = 0
    kv_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of this segment."""
        return self.stop - self.start + self.num_drafted

    @property
    def num_wanted(self) -> int:
        """Returns the number of rows, the segment's last ones, whose logits are wanted."""
        return 1 + self.num_drafted if self.samples else 0


@dataclass(frozen=True)
class Step:
    """Holds the segments (each one request's rows) that are computed together, in ascending order of adapter
    indices.

    Attributes:
        segments: the segments.
        preempted: the requests that gave up their KV before this step. One of them may be in `segments` all the same,
            if it was admitted again; it then begins with empty KV.
    """

    segments: tuple[Segment, ...]
    preempted: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of all segments."""
        return sum(segment.num_rows for segment in self.segments)

    @property
    def index_of_row(self) -> list[int]:
        """Returns the adapter index of each row, in ascending order."""
        return [segment.adapter_index for segment in self.segments for _ in range(segment.num_rows)]


@dataclass(frozen=True)
class Budget:
    """Holds the limits of a scheduler.

    Attributes:
        step_tokens: the most rows of a step.
        max_running: the most requests that run at a time.
        kv_bytes: the most bytes of KV that running requests reserve together.
        overtaking_s: the seconds for which smaller requests may be admitted before a request that does not fit.
        num_drafted: the rows for drafted tokens that each answer has in every step.
    """

    step_tokens: int
    max_running: int
    kv_bytes: int
    overtaking_s: float
    num_drafted: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigurationError if a limit is not a whole number above 0, `overtaking_s` is no time, or a step has
        too few rows for the answers of all running requests. `num_drafted` is not checked."""
        for name in ("step_tokens", "max_running", "kv_bytes"):
            positive(name, getattr(self, name))
        seconds("overtaking_s", self.overtaking_s)
        if self.step_tokens < self.max_running * (1 + self.num_drafted):
            each = f" times 1 + num_drafted ({1 + self.num_drafted})" if self.num_drafted else ""
            raise ConfigurationError(
                f"step_tokens ({self.step_tokens}) must be at least max_running ({self.max_running}){each}: every "
                f"running request may need {'as many rows' if each else 'a row'} in each step"
            )

    def check_fits(self, kv_bytes: int, prompt_bytes: int = 0) -> None:
        """Checks that a request that needs `kv_bytes` bytes for its keys and values can ever be admitted.

        Args:
            kv_bytes: the bytes of prompt and answer.
            prompt_bytes: the bytes of the prompt alone.

        Raises:
            WrongOption: the request, or already its prompt, is larger than the whole KV budget.
        """
        if kv_bytes > self.kv_bytes:
            raise WrongOption(
                f"the request needs {kv_bytes} bytes of KV, the engine has {self.kv_bytes}: ask for fewer tokens, or "
                "give the engine a larger kv_bytes or a smaller kv_dtype",
                "prompt" if prompt_bytes > self.kv_bytes else "max_new_tokens",
            )


def _nothing_read() -> int:
    return 0


@dataclass(eq=False)
class _Entry:
    """Holds the scheduler's state of one request.

    Attributes:
        place: the place of the request among all that were ever added.
        caller: the party that sent the request; see `Scheduler.add`.
        num_tokens: the number of tokens that are known: those of the prompt, and those of the answer so far.
        num_read: the number of these tokens that the model has computed.
        most_bytes: the bytes of KV of all tokens that the request will ever have.
        bytes_for: see `Scheduler.add`.
        kv_tokens, kv_bytes: the tokens for which the request reserves KV (None for all), and its bytes; while it waits,
            what it will reserve when it is admitted.
        start: see `Scheduler.add`.
        blocked_since: the time at which the request was first found ready, but too large for the free KV. At most one
            waiting request has such a time; it is None for all others.
        is_answered: whether the answer has begun, so that the prompt was computed.
    """

    request: int
    place: int
    caller: str
    num_tokens: int
    most_bytes: int
    adapter: Adapter
    start: Callable[[], int]
    bytes_for: Callable[[int], int] | None = None
    kv_tokens: int | None = None
    kv_bytes: int = 0
    num_read: int = 0
    blocked_since: float | None = None
    is_answered: bool = False

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_read

    def reserve(self, num_tokens: int) -> int:
        """Sets `kv_tokens` and `kv_bytes` to what `num_tokens` tokens need, if the request grows. Returns the number of
        further bytes."""
        before = self.kv_bytes
        if self.bytes_for is not None:
            self.kv_tokens = reserved_tokens(num_tokens)
            self.kv_bytes = min(self.bytes_for(self.kv_tokens), self.most_bytes)
        return self.kv_bytes - before


class Scheduler:
    """Admits the requests of one engine, and plans the engine's steps."""

    def __init__(self, budget: Budget) -> None:
        """Makes a scheduler without requests.

        Args:
            budget: the limits of the scheduler.
        """
        self.budget = budget
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}
        self._num_added = 0
        self.num_preemptions = 0
        """How often a request was preempted."""

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Returns the number of requests that were admitted, and were neither removed nor preempted since."""
        return len(self._running)

    @property
    def reserved_bytes(self) -> int:
        """Returns the bytes of keys and values that running requests reserve."""
        return sum(entry.kv_bytes for entry in self._running.values())

    def add(
        self, request: int, num_prompt: int, kv_bytes: int, adapter: Adapter, caller: str = "",
        start: Callable[[], int] = _nothing_read, bytes_for: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        """Adds a request, which waits until it is admitted.

        Args:
            request: a number that no other request has.
            num_prompt: the number of rows of the prompt, at least one.
            kv_bytes: the bytes of KV of the prompt and the longest answer.
            adapter: the request's adapter; the request is not admitted before the adapter is ready.
            caller: the party that the request is for; see the order of admission at the top of this module.
            start: called whenever the request is admitted, with the adapter ready. The function returns the number of
                the prompt's first rows that need not be computed, fewer than `num_prompt`.
            bytes_for: for a request that grows, returns the bytes of KV of a number of tokens; they do not fall with
                the number. None means that the request reserves `kv_bytes` when it is admitted.

        Raises:
            ConfigurationError: the request is larger than the whole KV budget.
        """
        self.budget.check_fits(kv_bytes)
        place, self._num_added = self._num_added, self._num_added + 1
        entry = _Entry(request, place, caller, num_prompt, kv_bytes, adapter, start, bytes_for, kv_bytes=kv_bytes)
        entry.reserve(num_prompt)
        self._waiting[request] = entry

    def remove(self, request: int) -> None:
        """Removes a request, whether it has ended or not; an unknown request is ignored."""
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def waiting(self) -> list[int]:
        """Returns the requests that are not admitted yet."""
        return list(self._waiting)

    def advance(self, step: Step) -> None:
        """Records that a step's rows were computed; requests that were removed in the meantime are ignored."""
        for segment in step.segments:
            entry = self._running.get(segment.request)
            if entry is not None:
                entry.num_read = segment.stop

    def append(self, request: int, num_new: int = 1) -> None:
        """Records that a running request has `num_new` more tokens. The model has yet to compute the last of them; the
        others were drafted, and computed in the last step."""
        entry = self._running[request]
        entry.is_answered = True
        entry.num_tokens += num_new
        entry.num_read += num_new - 1

    def plan(self, now: float) -> Step:
        """Reserves the memory that running requests need, admits the requests that may be admitted, and returns the
        next step. The step is empty if no request can run.

        Args:
            now: seconds on any clock that does not go back.
        """
        preempted = self._grow()
        self._admit(now)
        rows = {entry.request: 1 for entry in self._running.values() if entry.remaining == 1}
        num_drafted = sum(self._num_drafted(entry) for entry in self._running.values())
        rows |= self._prompt_rows(self.budget.step_tokens - len(rows) - num_drafted)
        segments = [
            self._segment(entry, rows[entry.request]) for entry in self._running.values() if entry.request in rows
        ]
        return Step(tuple(sorted(segments, key=lambda segment: segment.adapter_index)), tuple(preempted))

    def _grow(self) -> list[int]:
        """Reserves the KV of the tokens that running requests have got. Returns the requests that were preempted for
        it."""
        preempted: list[int] = []
        free = self.budget.kv_bytes - self.reserved_bytes
        for entry in tuple(self._running.values()):
            num_tokens = entry.num_tokens + self._num_drafted(entry)
            if entry.request not in self._running or entry.kv_tokens is None or num_tokens <= entry.kv_tokens:
                continue
            free -= entry.reserve(num_tokens)
            while free < 0:  # Ends with `entry` itself, if no request that grows was admitted later.
                last = next(each for each in reversed(self._running.values()) if each.bytes_for is not None)
                free += last.kv_bytes
                self._preempt(last)
                preempted.append(last.request)
        return preempted

    def _preempt(self, entry: _Entry) -> None:
        """Makes a running request wait again, at its old place, with its tokens known and none of them computed. It
        will reserve an eighth more than it needs, so that it makes some progress for the rows that are computed
        again."""
        del self._running[entry.request]
        entry.num_read, entry.is_answered = 0, False
        entry.reserve(entry.num_tokens + entry.num_tokens // _GROWTH)
        in_order = sorted((entry, *self._waiting.values()), key=lambda each: each.place)
        self._waiting = {each.request: each for each in in_order}
        self.num_preemptions += 1

    def _num_drafted(self, entry: _Entry) -> int:
        return self.budget.num_drafted if entry.is_answered else 0

    def _segment(self, entry: _Entry, num_rows: int) -> Segment:
        stop = entry.num_read + num_rows
        return Segment(
            entry.request, entry.num_read, stop, entry.adapter.adapter_index, stop == entry.num_tokens,
            self._num_drafted(entry), entry.kv_tokens,
        )  # fmt: skip

    def _prompt_rows(self, budget: int) -> dict[int, int]:
        """Shares a step's remaining rows among the prompts that are being computed, and returns the rows of each
        request that gets any. The oldest prompt gets up to half of them first, then the shortest prompts are served
        first."""
        reading = [entry for entry in self._running.values() if entry.remaining > 1]
        if not reading or budget < 1:
            return {}
        oldest, rows = reading[0], dict.fromkeys((entry.request for entry in reading), 0)
        for entry, most in ((oldest, (budget + 1) // 2), *((each, budget) for each in _shortest_first(reading))):
            taken = min(entry.remaining - rows[entry.request], most, budget)
            rows[entry.request] += taken
            budget -= taken
        return {request: taken for request, taken in rows.items() if taken}

    def _admit(self, now: float) -> None:
        free = self.budget.kv_bytes - self.reserved_bytes
        blocked = next((entry for entry in self._waiting.values() if entry.blocked_since is not None), None)
        for entry in self._in_turn():
            if len(self._running) >= self.budget.max_running:
                return
            if not entry.adapter.is_ready():
                continue
            if entry.kv_bytes <= free:
                free -= entry.kv_bytes
                self._running[entry.request] = self._waiting.pop(entry.request)
                entry.num_read = entry.start()
                blocked, entry.blocked_since = None if entry is blocked else blocked, None
                continue
            if blocked is None:
                blocked, entry.blocked_since = entry, now
            if entry.blocked_since is not None and now - entry.blocked_since >= self.budget.overtaking_s:
                return

    def _in_turn(self) -> Iterator[_Entry]:
        """Yields waiting requests in the order in which they are considered for admission. A request that is admitted
        between two yields counts for its caller at once."""
        yield from [entry for entry in self._waiting.values() if entry.blocked_since is not None]
        of_caller: dict[str, deque[_Entry]] = {}
        for entry in self._waiting.values():
            if entry.blocked_since is None:
                of_caller.setdefault(entry.caller, deque()).append(entry)
        running = Counter(entry.caller for entry in self._running.values())
        turns = [(running[caller], place, caller) for place, caller in enumerate(of_caller)]
        heapify(turns)  # Among equals, the first to come.
        while turns:
            num_running, place, caller = turns[0]
            entry = of_caller[caller].popleft()
            yield entry
            if of_caller[caller]:
                num_running += entry.request in self._running
                heapreplace(turns, (num_running, place, caller))
            else:
                heappop(turns)


def _shortest_first(entries: list[_Entry]) -> list[_Entry]:
    return sorted(entries, key=lambda entry: entry.remaining)
