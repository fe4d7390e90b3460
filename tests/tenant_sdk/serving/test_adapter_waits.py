"""Tests the engine with a store of adapters: a request waits only for its own adapter, and each hold is released."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.engine import Engine
from tests.support.engines import TIMEOUT_S, Gate
from wire.errors import ConfigurationError, VeilbaseError


@dataclass
class HeldLoan:
    """Implements a loan that the test makes ready."""

    adapter_index: int
    ready: bool = False
    failure: VeilbaseError | None = None
    num_released: int = 0

    def is_ready(self) -> bool:
        return self.ready

    @property
    def digest(self) -> str:
        return str(self.adapter_index)

    def release(self) -> None:
        self.num_released += 1


@dataclass
class Store:
    """Implements a store whose adapter of the index n adds sin(n·i) to number i of each of the model's embeddings."""

    model: Any
    wake: Callable[[], None]
    loans: list[HeldLoan] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    is_closed: bool = False
    is_late: bool = False

    def reserve(self, name: str) -> HeldLoan:
        if not name.startswith("a"):
            raise ConfigurationError(f"there is no adapter {name}")
        self.loans.append(HeldLoan(int(name[1:]), ready=not self.is_late))
        return self.loans[-1]

    @contextlib.contextmanager
    def in_step(self, index_of_row: list[int]) -> Iterator[None]:
        self.steps.append(index_of_row)
        shift = torch.sin(torch.tensor(index_of_row)[None, :, None] * torch.arange(32.0))
        hook = self.model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + shift)
        try:
            yield
        finally:
            hook.remove()

    def close(self) -> None:
        self.is_closed = True

    def settle(self, number: int, failure: VeilbaseError | None = None) -> None:
        """Makes a loan ready, or fails it, and wakes the engine from another thread, as a store does."""
        self.loans[number].ready, self.loans[number].failure = failure is None, failure
        thread = threading.Thread(target=self.wake)
        thread.start()
        thread.join(TIMEOUT_S)


@pytest.fixture
def made() -> list[Store]:
    return []


@pytest.fixture
def engine(client: TenantClient, made: list[Store]) -> Iterator[Engine]:
    def make(model: Any, wake: Callable[[], None]) -> Store:
        made.append(Store(model, wake))
        return made[-1]

    with Engine(client, make, step_tokens=32, max_running=4) as opened:
        yield opened


def test_each_row_gets_its_own_adapter_in_the_order_of_their_indices(engine: Engine, made: list[Store]) -> None:
    names = ("a3", None, "a1", "a2")
    alone = [engine.submit("who?", name, 6).result(TIMEOUT_S) for name in names]
    assert len(set(alone)) == len(names)
    (store,) = made
    store.steps.clear()
    gate = Gate()
    hold = engine.submit("b", None, 1, logits_processor=[gate])
    assert gate.reached.wait(TIMEOUT_S)
    answers = [engine.submit("who?", name, 6) for name in names]
    gate.open.set()
    hold.result(TIMEOUT_S)
    assert [answer.result(TIMEOUT_S) for answer in answers] == alone
    assert all(rows == sorted(rows) for rows in store.steps)
    assert max(len(set(rows)) for rows in store.steps) == 4
    assert all(loan.num_released == 1 for loan in store.loans)


def test_a_request_waits_for_its_adapter_and_stalls_nobody(engine: Engine, made: list[Store]) -> None:
    want, base = engine.submit("who?", "a2", 6).result(TIMEOUT_S), engine.submit("who?", None, 6).result(TIMEOUT_S)
    made[0].is_late = True
    late = engine.submit("who?", "a2", 6)
    assert engine.submit("who?", None, 6).result(TIMEOUT_S) == base
    assert not late.is_done
    made[0].settle(1)
    assert late.result(TIMEOUT_S) == want


def test_an_adapter_that_cannot_be_loaded_ends_its_own_request(engine: Engine, made: list[Store]) -> None:
    engine.submit("who?", None, 2).result(TIMEOUT_S)
    made[0].is_late = True
    late, other = engine.submit("who?", "a2", 6), engine.submit("who?", "a1", 6)
    made[0].settle(0, ConfigurationError("adapter a2 is of another base"))
    with pytest.raises(ConfigurationError, match="adapter a2 is of another base"):
        late.result(TIMEOUT_S)
    made[0].settle(1)
    other.result(TIMEOUT_S)
    assert [loan.num_released for loan in made[0].loans] == [1, 1]


def test_a_request_that_is_cancelled_while_its_adapter_loads_lets_it_go(engine: Engine, made: list[Store]) -> None:
    engine.submit("who?", None, 2).result(TIMEOUT_S)
    made[0].is_late = True
    late = engine.submit("who?", "a2", 6)
    late.cancel()
    assert late.result(TIMEOUT_S) == ""
    assert made[0].loans[0].num_released == 1


def test_refused_requests_hold_nothing(engine: Engine, made: list[Store]) -> None:
    engine.submit("who?", None, 2).result(TIMEOUT_S)
    with pytest.raises(ConfigurationError, match="there is no adapter b"):
        engine.submit("who?", "b", 6)
    with pytest.raises(ConfigurationError):
        engine.submit("who?", "a1", 1000)
    assert made[0].loans == []


def test_closing_gives_every_hold_back_and_closes_the_store(client: TenantClient, made: list[Store]) -> None:
    def make(model: Any, wake: Callable[[], None]) -> Store:
        made.append(Store(model, wake, is_late=True))
        return made[-1]

    engine = Engine(client, make)
    late = engine.submit("who?", "a1", 6)
    engine.close()
    with pytest.raises(ConfigurationError, match="closed"):
        late.result(TIMEOUT_S)
    assert made[0].loans[0].num_released == 1
    assert made[0].is_closed
    with pytest.raises(ConfigurationError, match="closed"):
        engine.submit("who?", "a1", 6)


def test_a_step_whose_adapters_fail_ends_the_requests_of_that_step(
    engine: Engine, made: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Store, index_of_row: list[int]) -> Any:
        raise RuntimeError("shows numbers")

    want = engine.submit("who?", None, 4).result(TIMEOUT_S)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "in_step", broken)
        with pytest.raises(VeilbaseError, match=r"a step of the engine failed \(RuntimeError\)"):
            engine.submit("who?", None, 4).result(TIMEOUT_S)
    assert engine.submit("who?", None, 4).result(TIMEOUT_S) == want
