"""Tests how the provider's process takes what an actor answers, without a cluster."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from provider.cluster.actors import MOST_DEATHS, ActorReplica
from provider.engine.replica import ReplicaLost
from tests.support.providers import make_served_model
from tests.support.ring_products import ring_rows
from tests.support.tiny_models import make_chat_model
from wire.errors import RemoteFault, UnknownLayer, WireCode
from wire.frame import Arithmetic, Call, Direction
from wire.manifest import GroupInfo

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class Method:
    """Stands for a method of an actor: `ray.get` of its call returns or raises what `answers` holds next."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def remote(self, *_: Any) -> Method:
        return self

    def future(self) -> Future[None]:
        return self.answers[0]  # type: ignore[no-any-return]


class Actor:
    """Stands for an actor's handle."""

    def __init__(self) -> None:
        self.end: Future[None] = Future()
        self.refusal, self.product, self.wait_for_ever = Method(""), Method(), Method(self.end)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> GroupInfo:
    folder = make_chat_model(tmp_path_factory.mktemp("replica") / "tiny")
    return make_served_model(folder, "native").manifest().groups[0]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes `ray.get` return the answers of methods, and notes for each `ray.kill` whether the actor is started
    again."""
    noted: list[bool] = []

    def get(method: Method, timeout: float) -> Any:
        answer = method.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda _, no_restart=True: noted.append(not no_restart))
    return noted


def running(info: GroupInfo) -> tuple[ActorReplica, Actor]:
    """Returns a replica that computes, and the actor behind it."""
    actor = Actor()
    replica = ActorReplica("0-0", {0: info}, actor)
    assert not replica.is_alive
    assert replica.refusal(1.0) == ""
    assert replica.is_alive
    return replica, actor


def product(replica: ActorReplica, info: GroupInfo) -> torch.Tensor:
    cols = info.widths(CALL.direction)[0]
    return replica.product(CALL, ring_rows(2).repeat(1, 8)[:, :cols].contiguous())


@pytest.mark.usefixtures("killed")
def test_an_answer_is_the_product(info: GroupInfo) -> None:
    replica, actor = running(info)
    cols = info.widths(CALL.direction)[1]
    expected = torch.arange(2 * cols, dtype=torch.int32).view(2, cols)
    actor.product.answers.append(expected.numpy().tobytes())
    assert torch.equal(product(replica, info), expected)


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("answer", [b"", b"short", bytes(1 << 20), None, "text", [1], 1.0, bytearray(8)])
def test_an_answer_of_another_size_or_kind_is_a_loss(info: GroupInfo, answer: Any) -> None:
    replica, actor = running(info)
    actor.product.answers.append(answer)
    with pytest.raises(ReplicaLost) as lost:
        product(replica, info)
    assert lost.value.began
    assert not replica.is_alive


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize(
    ("code", "error"),
    [(WireCode.UNKNOWN_LAYER, UnknownLayer), (0, RemoteFault), (-1, RemoteFault), (1 << 70, RemoteFault)],
)
def test_a_code_is_an_error_of_the_request(info: GroupInfo, code: int, error: type[Exception]) -> None:
    replica, actor = running(info)
    actor.product.answers.append(int(code))
    with pytest.raises(error):
        product(replica, info)
    assert replica.is_alive


def test_one_that_hangs_is_killed_and_started_again(info: GroupInfo, killed: list[bool]) -> None:
    replica, actor = running(info)
    actor.product.answers.append(GetTimeoutError())
    with pytest.raises(ReplicaLost):
        product(replica, info)
    assert killed == [True]
    actor.refusal.answers += [GetTimeoutError(), ActorUnavailableError("gone", None), ""]
    assert replica.revive(threading.Event())
    assert replica.is_alive


@pytest.mark.usefixtures("killed")
def test_the_end_of_the_call_is_the_end_of_the_actor(info: GroupInfo) -> None:
    replica, actor = running(info)
    actor.end.set_exception(ActorUnavailableError("gone", None))
    assert not replica.is_alive
    with pytest.raises(ReplicaLost) as lost:
        product(replica, info)
    assert not lost.value.began


@pytest.mark.usefixtures("killed")
def test_one_that_ray_ended_for_good_is_given_up(info: GroupInfo) -> None:
    """Otherwise a provider waits a quarter of an hour at its start, and tenants are told for ever to try again."""
    replica, actor = running(info)
    actor.refusal.answers += [ActorDiedError()] * MOST_DEATHS
    assert not replica.revive(threading.Event())
    assert not replica.can_return


@pytest.mark.usefixtures("killed")
def test_a_single_death_is_not_believed(info: GroupInfo) -> None:
    replica, actor = running(info)
    actor.refusal.answers += [ActorDiedError(), ActorUnavailableError("gone", None), ""]
    assert replica.revive(threading.Event())
