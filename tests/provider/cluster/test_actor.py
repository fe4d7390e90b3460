"""Tests an actor's code without a cluster: what it computes, and what it refuses to hold."""

from __future__ import annotations

import threading
import types
from pathlib import Path

import pytest
import torch

from provider.cluster.actor import Assignment, ShardActor
from provider.model.served_model import ServedModel
from tests.support.providers import make_served_model
from tests.support.ring_products import ring_rows
from tests.support.tiny_models import make_chat_model
from tests.support.waiting import WAIT_S, comes, until
from wire.errors import WireCode
from wire.frame import PROTOCOL_VERSION, Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.ring.seeded_rows import SeededRows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("actor") / "tiny")


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return make_served_model(folder, "native")


def assignment(served: ServedModel, folder: Path, **changes: object) -> Assignment:
    digests = dict(list(served.fingerprints.items())[:2])
    options = {"model": str(folder), "weights": "native", "base_layers": None, "digests": digests, "threads": None}
    return Assignment(**{**options, **changes})  # type: ignore[arg-type]


def header(call: Call, rows: int = 0, cols: int = 0) -> bytes:
    return Header(FrameType.REQUEST, 1, call, rows, cols).pack()


@pytest.fixture(scope="module")
def actor(served: ServedModel, folder: Path) -> ShardActor:
    made = ShardActor(assignment(served, folder))
    assert made.refusal() == ""
    return made


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_products_are_those_of_the_providers_process(
    actor: ShardActor, served: ServedModel, direction: Direction, arithmetic: Arithmetic
) -> None:
    call = Call(1, direction, arithmetic)
    cols = served.manifest().groups[1].widths(direction)[0]
    rows = ring_rows(5).repeat(1, 8)[:, :cols].contiguous()
    if arithmetic is Arithmetic.FLOAT:
        rows = torch.randn(5, cols, generator=torch.Generator().manual_seed(0))
    reply = actor.product(header(call, *rows.shape), rows.numpy().tobytes())
    assert reply == served.compute(call, rows).numpy().tobytes()


def test_the_product_of_a_seed(actor: ShardActor, served: ServedModel) -> None:
    call = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    rows = SeededRows(bytes(range(32)), 0, 7)
    reply = actor.product(header(call, 7), rows.pack())
    assert reply == served.compute(call, rows).numpy().tobytes()


def test_what_it_does_not_hold_and_what_cannot_be_are_codes(actor: ShardActor) -> None:
    def answer(call: Call, payload: bytes = bytes(12)) -> bytes | int:
        return actor.product(header(call, 1, 3), payload)

    assert answer(Call(7, Direction.FORWARD, Arithmetic.RING)) == WireCode.UNKNOWN_LAYER
    assert answer(Call(0, Direction.FORWARD, Arithmetic.RING)) == WireCode.INVALID_TENSOR
    assert isinstance(answer(Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT), b"short"), int)
    assert answer(Call(0, Direction.FORWARD, Arithmetic.RING), b"none") == WireCode.INTERNAL


def test_other_weights_another_release_and_no_model_are_one_line(served: ServedModel, folder: Path) -> None:
    digests = {0: served.fingerprints[1]}
    for changes, text in (
        ({"digests": digests}, "other weights of group 0"),
        ({"digests": {999: digests[0]}}, "other weights of group 999"),
        ({"weights": "int8"}, "other weights of group 0"),
        ({"protocol": PROTOCOL_VERSION + 1}, "the same release"),
        ({"model": str(folder / "none")}, "cannot find the model"),
    ):
        refusal = ShardActor(assignment(served, folder, **changes)).refusal()
        assert text in refusal
        assert "\n" not in refusal


def test_a_second_look_frees_the_thread_of_the_first(served: ServedModel, folder: Path) -> None:
    """An actor has two threads. Two calls that never end would leave none for products."""
    made = ShardActor(assignment(served, folder))
    looking = [threading.Thread(target=made.wait_for_ever, daemon=True) for _ in range(2)]
    for each in looking:
        each.start()
    until(lambda: sum(each.is_alive() for each in looking) == 1, "the end of the earlier call")


def test_whatever_else_fails_is_one_line(served: ServedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would not restart an actor that raises an error at its start, and would not tell the provider's process
    why."""

    def fail(_model: object) -> None:
        raise MemoryError("two\nlines")

    monkeypatch.setattr("provider.model.load.load", fail)
    refusal = ShardActor(assignment(served, folder)).refusal()
    assert refusal == "a host of the cluster could not load the model (MemoryError): see Ray's logs there"


def test_of_two_looks_at_once_only_the_later_keeps_a_thread(
    served: ServedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_come = threading.Event()

    class Meanwhile(threading.Event):
        """Makes the second call come while the first one is under way."""

        def set(self) -> None:
            if threading.current_thread() is looking[0]:
                looking[1].start()
                comes(has_come, "the second call")
            else:
                has_come.set()
            super().set()

    named = types.SimpleNamespace(Event=Meanwhile, Lock=threading.Lock, Thread=threading.Thread)
    monkeypatch.setattr("provider.cluster.actor.threading", named)
    made = ShardActor(assignment(served, folder))
    looking = [threading.Thread(target=made.wait_for_ever, daemon=True) for _ in range(2)]
    looking[0].start()
    looking[0].join(WAIT_S)
    assert [each.is_alive() for each in looking] == [False, True]


def test_an_actor_that_computes_nothing_lets_nobody_wait(served: ServedModel, folder: Path) -> None:
    """Ray may start an actor again, with other weights, between the calls of `refusal` and of `wait_for_ever`."""
    made = ShardActor(assignment(served, folder, weights="int8"))
    looking = threading.Thread(target=made.wait_for_ever, daemon=True)
    looking.start()
    until(lambda: not looking.is_alive(), "the end of the call")
