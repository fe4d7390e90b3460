"""This module lets training wait for the engine, so that answers stay fast while a job trains.

Training and the engine share the processors and the provider. While the engine computes a step for its requests, a job
goes on for a short time, its slice, and then waits at its next call to the provider until the step is over. Without
requests a job never waits. Guarantees: the engine never waits for a job; a job gets at least one call for each step of
the engine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

_SHARE = 0.5
"""A job's slice, as a share of the shortest of the last steps. Even if a step stands still while they overlap, answers
then take half as long again."""
NUM_STEPS = 16
"""The number of last steps among which the shortest one is taken: a step that overlapped, or that read a long prompt,
says little about how fast the engine can be."""


class Turns:
    """Holds whether the engine computes a step, how long its last steps took, and when the job's slice began."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_wait_s: float = 2.0) -> None:
        """Makes turns without a step.

        Args:
            clock: Returns the present time in seconds.
            most_wait_s: The most seconds that a job waits for one step, which may itself wait for a provider that is
                away.
        """
        self.most_wait_s = most_wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._is_in_step = False
        self._lasted_s: deque[float] = deque([0.0], maxlen=NUM_STEPS)
        self._slice_began = clock()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context in which the engine computes a step."""
        began = self._clock()
        self._is_in_step = True
        try:
            yield
        finally:
            with self._changed:
                self._is_in_step = False
                self._lasted_s.append(self._clock() - began)
                self._changed.notify_all()

    def pause(self) -> None:
        """Waits until no step is computed, if the job's slice is over; the job calls this before each of its calls."""
        with self._changed:
            if self._clock() - self._slice_began < _SHARE * min(self._lasted_s):
                return
            self._changed.wait_for(lambda: not self._is_in_step, self.most_wait_s)
            self._slice_began = self._clock()
