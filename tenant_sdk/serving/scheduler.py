"""Decides which rows go through the model in the next step: pure, told the time, without tensors or threads.

A step has one row for every request that is being answered, so that none of them ever waits for another's prompt, and
fills what is left of its token budget with pieces of prompts. Requests join and leave at every step.

Guarantees:
- a request that was admitted has its whole KV reserved, so it never waits for memory again and is never thrown out;
- a request whose adapter is still loading waits, and keeps no other request from being admitted;
- callers share the running places: the caller with the fewest running requests is admitted first, each caller's
  requests in the order in which they came, as far as they are ready and fit;
- a request that does not fit is overtaken by smaller ones for `overtaking_s` seconds; after that nobody is admitted
  before it;
- of the prompts that are read, the oldest gets half of the budget or more, so it ends; the shortest get the rest first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from wire.errors import ConfigurationError


class Adapter(Protocol):
    """What the scheduler asks of a request's adapter."""

    def is_ready(self) -> bool:
        """Whether `slot` is valid."""

    @property
    def slot(self) -> int:
        """The adapter's place on the device."""


@dataclass(frozen=True)
class Segment:
    """Rows of one request in a step.

    Attributes:
        request: the request's number.
        start, stop: the range of the request's tokens, prompt and answer counted through, that go through the model.
        slot: the place of the request's adapter.
        samples: whether these are the last tokens that are known, so that the last row gives the next token.
    """

    request: int
    start: int
    stop: int
    slot: int
    samples: bool

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """What goes through the model together: segments in ascending order of their slots, one a request."""

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """The number of rows of all segments."""
        return sum(segment.num_rows for segment in self.segments)

    @property
    def slot_of_row(self) -> list[int]:
        """The slot of each row, ascending."""
        return [segment.slot for segment in self.segments for _ in range(segment.num_rows)]


@dataclass(frozen=True)
class Budget:
    """What a scheduler may spend.

    Attributes:
        step_tokens: most rows of a step.
        max_running: most requests that are being read or answered at a time.
        kv_bytes: most bytes of KV that running requests may reserve together.
        overtaking_s: seconds for which smaller requests may be admitted before one that does not fit.
    """

    step_tokens: int = 256
    max_running: int = 16
    kv_bytes: int = 1 << 30
    overtaking_s: float = 2.0

    def __post_init__(self) -> None:
        """Refuses budgets under which a request could wait for ever."""
        for name in ("step_tokens", "max_running", "kv_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be a positive whole number, got {ascii(value)[:40]}")
        if self.step_tokens < self.max_running:
            raise ConfigurationError(
                f"step_tokens ({self.step_tokens}) must be at least max_running ({self.max_running}): every running "
                "request may need a row in each step"
            )

    def check_fits(self, kv_bytes: int) -> None:
        """Refuses a request that could never be admitted.

        Raises:
            ConfigurationError: the request is larger than the whole KV budget.
        """
        if kv_bytes > self.kv_bytes:
            raise ConfigurationError(
                f"the request needs {kv_bytes} bytes of KV, the engine has {self.kv_bytes}: ask for fewer tokens, or "
                "give the engine a larger kv_bytes or a smaller kv_dtype"
            )


@dataclass(eq=False)
class _Entry:
    """One request.

    Attributes:
        caller: the party that sent the request, which shares running places with other callers.
        num_tokens: the tokens that are known: the prompt's, then those of the answer, too.
        num_read: how many of them went through the model.
        kv_bytes: what the request reserves when it is admitted.
        blocked_since: the time at which it was first found ready and too large for what is left of the KV.
    """

    request: int
    caller: str
    num_tokens: int
    kv_bytes: int
    adapter: Adapter
    num_read: int = 0
    blocked_since: float | None = None

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_read


class Scheduler:
    """The waiting and the running requests of one engine."""

    def __init__(self, budget: Budget) -> None:
        """Args: budget: what may be spent."""
        self.budget = budget
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}

    @property
    def num_waiting(self) -> int:
        """The number of requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of requests that are being read or answered."""
        return len(self._running)

    @property
    def reserved_bytes(self) -> int:
        """The KV that running requests reserve."""
        return sum(entry.kv_bytes for entry in self._running.values())

    def add(self, request: int, num_prompt: int, kv_bytes: int, adapter: Adapter, caller: str = "") -> None:
        """Takes a request in.

        Args:
            request: a number that no other request has.
            num_prompt: rows of its prompt, at least one.
            kv_bytes: what its prompt and its longest answer take.
            adapter: tells when the request may be admitted.
            caller: the party that it is for.

        Raises:
            ConfigurationError: the request is larger than the whole KV budget.
        """
        self.budget.check_fits(kv_bytes)
        self._waiting[request] = _Entry(request, caller, num_prompt, kv_bytes, adapter)

    def remove(self, request: int) -> None:
        """Lets a request go, at its end or before; an unknown one is ignored."""
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    def is_running(self, request: int) -> bool:
        """Whether the request was admitted and is not removed."""
        return request in self._running

    def waiting(self) -> list[int]:
        """Returns the requests that are not admitted yet."""
        return list(self._waiting)

    def advance(self, step: Step) -> None:
        """Notes that a step's rows went through the model; requests that were removed meanwhile are ignored."""
        for segment in step.segments:
            entry = self._running.get(segment.request)
            if entry is not None:
                entry.num_read = segment.stop

    def append(self, request: int, num_tokens: int = 1) -> None:
        """Notes that a running request has more tokens, which have yet to go through the model."""
        self._running[request].num_tokens += num_tokens

    def plan(self, now: float) -> Step:
        """Admits what may be admitted and returns the next step, which is empty when nothing can run.

        Args:
            now: seconds on any clock that does not go back.
        """
        self._admit(now)
        rows = {entry.request: 1 for entry in self._running.values() if entry.remaining == 1}
        rows |= self._prompt_rows(self.budget.step_tokens - len(rows))
        segments = [
            self._segment(entry, rows[entry.request]) for entry in self._running.values() if entry.request in rows
        ]
        return Step(tuple(sorted(segments, key=lambda segment: segment.slot)))

    @staticmethod
    def _segment(entry: _Entry, num_rows: int) -> Segment:
        stop = entry.num_read + num_rows
        return Segment(entry.request, entry.num_read, stop, entry.adapter.slot, stop == entry.num_tokens)

    def _prompt_rows(self, budget: int) -> dict[int, int]:
        """Shares a step's remaining rows among the prompts that are being read: first half of it for the oldest."""
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
        for entry in self._in_turn():
            if len(self._running) >= self.budget.max_running:
                return
            if not entry.adapter.is_ready():
                continue
            if entry.kv_bytes <= free:
                free -= entry.kv_bytes
                self._running[entry.request] = self._waiting.pop(entry.request)
                continue
            entry.blocked_since = now if entry.blocked_since is None else entry.blocked_since
            if now - entry.blocked_since >= self.budget.overtaking_s:
                return

    def _in_turn(self) -> Iterator[_Entry]:
        """Yields waiting requests in the order in which they are considered; what is admitted in between counts."""
        yield from [entry for entry in self._waiting.values() if entry.blocked_since is not None]
        of_caller: dict[str, deque[_Entry]] = {}
        for entry in self._waiting.values():
            if entry.blocked_since is None:
                of_caller.setdefault(entry.caller, deque()).append(entry)
        running = Counter(entry.caller for entry in self._running.values())
        while of_caller:
            caller = min(of_caller, key=running.__getitem__)  # of equals, the one whose request came first
            entry = of_caller[caller].popleft()
            if not of_caller[caller]:
                del of_caller[caller]
            yield entry
            running[caller] += entry.request in self._running


def _shortest_first(entries: list[_Entry]) -> list[_Entry]:
    return sorted(entries, key=lambda entry: entry.remaining)
