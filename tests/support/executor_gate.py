"""An executor that stands still until it is told, and the answers to what it was asked meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.job import Job, Outcome
from provider.engine.profile import latency_model
from provider.engine.replica import Here
from provider.model.served_model import ServedModel
from provider.operations.meter import Meter
from provider.schedule.policy import Policy
from provider.schedule.request_class import RequestClass
from provider.schedule.scheduler import Scheduler
from tests.support.ring_products import CALL
from tests.support.ring_rows import COLS
from tests.support.waiting import comes
from wire.frame import Arithmetic, Call, Direction
from wire.ring.seeded_rows import Rows, count_rows

RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT


class Gate:
    """An executor whose thread stands still until `open`, so that what comes meanwhile meets in the queue."""

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
        """Waits while the gate is shut, notes what is multiplied, and makes the product."""
        if not self._may_go.is_set():
            self._stands.set()
            comes(self._may_go, "`open`")
        self.batches.append((call, count_rows(rows)))
        return self._served_model.compute(call, rows)

    def submit(
        self,
        rows: Rows,
        call: Call = CALL,
        tenant: str = "acme",
        kind: RequestClass = RequestClass.FINETUNE,
        seconds: float = 60.0,
    ) -> Answer:
        """Asks for a product as a tenant does."""
        answer = Answer()
        answer.job = Job(call, rows, tenant, kind, time.monotonic() + seconds, answer.take, 64)
        self.executor.submit(answer.job)
        return answer

    def open(self) -> None:
        """Lets the thread go on."""
        self._may_go.set()


class Answer:
    """Keeps what a request came to."""

    job: Job

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self._done = threading.Event()

    def take(self, outcome: Outcome) -> None:
        """Notes the outcome; the executor calls this."""
        self.outcomes.append(outcome)
        self._done.set()

    def get(self) -> Outcome:
        """Waits for the outcome, of which there is one."""
        comes(self._done, "an answer")
        assert len(self.outcomes) == 1
        return self.outcomes[0]


@pytest.fixture
def gate(served_model: ServedModel) -> Iterator[Gate]:
    """A gate that is opened at the end, where a test has not done so."""
    made = Gate(served_model)
    yield made
    made.open()
    made.executor.close()
