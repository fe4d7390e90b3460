"""Makes an executor that computes nothing until the test opens it, and a stand-in for an executor behind a session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.profile import latency_model
from provider.engine.replica import Here
from provider.engine.request import Outcome, Request
from provider.model.served_model import ServedModel
from provider.operations.metrics import Meter
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import RequestClass
from tests.support.ring_products import CALL, COLS
from tests.support.waiting import comes
from wire.errors import VeilbaseError
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.ring.seeded_rows import Rows, count_rows

RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT


class Gate:
    """Holds an executor whose worker thread waits until `open` is called, so that requests meet in the queue."""

    def __init__(
        self,
        served_model: ServedModel,
        policy: Policy | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        self.batches: list[tuple[Call, int]] = []
        self.recorded: list[tuple[str, Call, Rows, torch.Tensor | None]] = []
        self.meter = Meter()
        self._served_model, self._may_go, self._stands = served_model, threading.Event(), threading.Event()
        latency = latency_model(served_model.served, profiled=False)
        self.scheduler = Scheduler(policy or Policy(max_wait_s=0.001), latency)
        self.executor = Executor(
            [Here(self.product)], self.scheduler, lambda *what: self.recorded.append(what), self.meter, charge
        )
        self.blocker = self.submit(torch.zeros(1, COLS, dtype=torch.int32), Call(1, Direction.FORWARD, RING))
        comes(self._stands, "the product that holds the thread")
        self.batches.clear()

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Waits until the gate is open, notes the call and the number of rows, and computes the product."""
        if not self._may_go.is_set():
            self._stands.set()
            comes(self._may_go, "`open`")
        self.batches.append((call, count_rows(rows)))
        return self._served_model.compute(call, rows)

    def submit(self, rows: Rows, *about: Any, **named: Any) -> Answer:
        """Submits a request for a product, as a tenant's session does; see `Answer` for what may be said about it."""
        answer = Answer(rows, *about, **named)
        self.executor.submit(answer.request)
        return answer

    def open(self) -> None:
        """Lets the worker thread continue."""
        self._may_go.set()


class Answer:
    """Holds a complete request, as a tenant's session makes it, and keeps its outcome."""

    def __init__(
        self,
        rows: Rows,
        call: Call = CALL,
        tenant: str = "acme",
        kind: RequestClass = RequestClass.FINETUNE,
        seconds: float = 60.0,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._done = threading.Event()
        header = Header(FrameType.REQUEST, 1, call, count_rows(rows))
        self.request = Request(tenant, header, 64, kind, time.monotonic() + seconds, self.take)
        self.request.complete(rows)

    def take(self, request: Request, outcome: Outcome) -> None:
        """Keeps the outcome; the executor calls this method."""
        assert request is self.request
        self.outcomes.append(outcome)
        self._done.set()

    def get(self) -> Outcome:
        """Waits for the outcome and returns it. There must be exactly one outcome."""
        comes(self._done, "an answer")
        assert len(self.outcomes) == 1
        return self.outcomes[0]


@pytest.fixture
def gate(served_model: ServedModel) -> Iterator[Gate]:
    """Provides a gate. After the test the gate is opened, in case the test did not do so."""
    made = Gate(served_model)
    yield made
    made.open()
    made.executor.close()


class Desk:
    """Stands in for an executor: it queues every request, and replies to rows as the test sets."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self.here: Outcome | None = None
        """The outcome of small requests, which the reading thread computes itself. None means that they are queued
        instead."""
        self.row: VeilbaseError | bool = True
        self.num_rows = 0

    def submit(self, request: Request) -> None:
        """Keeps a request."""
        self.requests.append(request)

    def cancel(self, request: Request) -> None:
        """Keeps a request that is cancelled."""
        self.cancelled.append(request)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Returns what the test has set."""
        return self.here

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Writes bytes that count up, and returns what the test has set."""
        self.num_rows += 1
        reply[:] = bytes(range(len(reply)))
        return self.row
