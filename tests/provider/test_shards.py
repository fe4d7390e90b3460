"""Tests shards in processes of their own: replies are the same, a loss in the middle is survived, errors are clear, and
nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from provider.embedded import serve_in_process
from provider.engine.replica import ReplicaLost
from provider.model.served_model import ServedModel
from provider.shards.local import LocalShards, ShardedModel
from provider.shards.messages import KEPT_BYTES, SharedRows
from provider.shards.process import ShardProcess
from provider.shards.router import make_plan
from tests.support.tiny_models import make_tiny
from tests.support.waiting import WAIT_S, end
from wire.errors import ConfigurationError, InvalidTensor, RemoteFault, UnknownLayer
from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import SeededRows


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("model") / "gpt2"
    make_tiny("gpt2", folder)
    return serve_in_process(str(folder))


@pytest.fixture(scope="module")
def shards(served_model: ServedModel) -> Iterator[LocalShards]:
    started = LocalShards.start(served_model.served, 3, 1)
    yield started
    started.close()


def replica_of(shards: LocalShards, group: int) -> ShardProcess:
    return next(replicas[0] for ids, replicas in zip(shards.plan, shards.replicas, strict=True) if group in ids)


@contextmanager
def one_process(served_model: ServedModel) -> Iterator[ShardProcess]:
    """Provides the only process of the only shard, which ends with the context."""
    started = LocalShards.start(served_model.served, 1, 1)
    try:
        yield replica_of(started, 0)
    finally:
        started.close()


def rows_of(served_model: ServedModel, call: Call, num_rows: int) -> torch.Tensor:
    info = served_model.manifest().groups[call.group]
    cols = info.in_features if call.direction is Direction.FORWARD else info.out_features
    if call.arithmetic is Arithmetic.FLOAT:
        return torch.randn(num_rows, cols)
    return torch.randint(-(2**31), 2**31 - 1, (num_rows, cols), dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 300])
def test_every_product_is_the_same(served_model: ServedModel, shards: LocalShards, num_rows: int) -> None:
    for group in range(len(served_model.manifest().groups)):
        for direction in Direction:
            for arithmetic, purpose in ((Arithmetic.RING, Purpose.PRODUCT), (Arithmetic.FLOAT, Purpose.PRODUCT),
                                        (Arithmetic.FLOAT, Purpose.EFFECT)):  # fmt: skip
                call = Call(group, direction, arithmetic, purpose)
                rows = rows_of(served_model, call, num_rows)
                reply, expected = replica_of(shards, group).product(call, rows), served_model.compute(call, rows)
                assert reply.dtype == DTYPES[arithmetic]
                assert (
                    torch.equal(reply, expected) if arithmetic is Arithmetic.RING else torch.allclose(reply, expected)
                )
            hint = Call(group, direction, Arithmetic.RING, Purpose.HINT)
            seeded = SeededRows(bytes(range(32)), 5, num_rows)
            assert torch.equal(replica_of(shards, group).product(hint, seeded), served_model.compute(hint, seeded))


def test_a_reply_owns_its_memory(served_model: ServedModel, shards: LocalShards) -> None:
    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    first = replica_of(shards, 0).product(call, rows_of(served_model, call, 4))
    kept = first.clone()
    replica_of(shards, 0).product(call, rows_of(served_model, call, 4))
    assert torch.equal(first, kept)


def test_faults_of_a_request_are_typed(served_model: ServedModel, shards: LocalShards) -> None:
    call = Call(0, Direction.FORWARD, Arithmetic.FLOAT)
    broken = rows_of(served_model, call, 2)
    broken[1, 1] = float("nan")
    replica = replica_of(shards, 0)
    with pytest.raises(InvalidTensor):
        replica.product(call, broken)
    with pytest.raises(InvalidTensor):
        replica.product(call, torch.zeros(2, 7))
    with pytest.raises(UnknownLayer):
        replica.product(Call(0, Direction.FORWARD, Arithmetic.FLOAT, Purpose.HINT), SeededRows(bytes(32), 0, 1))
    rows = rows_of(served_model, call, 2)
    assert torch.allclose(replica.product(call, rows), served_model.compute(call, rows))


def test_what_a_large_request_needed_is_given_back() -> None:
    owner = SharedRows.create(1000)
    other = SharedRows(os.dup(owner.descriptor))
    try:
        other.follow(owner.num_bytes)
        owner.view(3, 5, torch.int32).copy_(torch.arange(15).view(3, 5))
        assert torch.equal(other.view(3, 5, torch.int32), torch.arange(15, dtype=torch.int32).view(3, 5))
        owner.hold(KEPT_BYTES + 1)
        assert owner.num_bytes == 2 * KEPT_BYTES
        other.follow(owner.num_bytes)
        owner.give_back()
        assert os.fstat(owner.descriptor).st_size == KEPT_BYTES
        other.follow(owner.num_bytes)
        with pytest.raises(ValueError, match=r"size|large|buffer"):
            owner.view(KEPT_BYTES, 1, torch.int32)
    finally:
        owner.close()
        other.close()


@pytest.mark.slow
def test_a_lost_process_is_started_again(served_model: ServedModel) -> None:
    with one_process(served_model) as replica:
        call = Call(0, Direction.FORWARD, Arithmetic.RING)
        rows = rows_of(served_model, call, 3)
        first = replica.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ReplicaLost):
            replica.product(call, rows)
        with pytest.raises(ReplicaLost):
            replica.product(call, rows)
        assert replica.can_return
        assert replica.revive(threading.Event())
        assert replica.pid not in (None, first)
        assert torch.equal(replica.product(call, rows), served_model.compute(call, rows))
    assert replica.pid is None
    assert not replica.can_return


def test_a_process_that_is_killed_in_a_product(served_model: ServedModel) -> None:
    with one_process(served_model) as replica:
        call = Call(0, Direction.FORWARD, Arithmetic.RING)
        rows = rows_of(served_model, call, 3)
        pid = replica.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        outcomes: list[object] = []

        def ask() -> None:
            try:
                outcomes.append(replica.product(call, rows))
            except ReplicaLost as exc:
                outcomes.append(exc)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(timeout=0.5)
        assert not outcomes, "the process stands still with the request"
        os.kill(pid, signal.SIGKILL)
        end(asking)
        (lost,) = outcomes
        assert isinstance(lost, ReplicaLost)
        assert lost.began


@pytest.mark.slow
def test_one_that_ends_again_and_again_is_given_up(served_model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    with one_process(served_model) as replica:
        replica._weights = os.open(os.devnull, os.O_RDONLY)  # from now on, a new process finds no weights
        replica._restarts.extend([time.monotonic()] * 3)  # some of the allowed restarts are used up
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        assert not replica.revive(threading.Event())
        assert "is given up, since it was started again 5 times" in caplog.text
        assert "start the provider again" in caplog.text
        with pytest.raises(ReplicaLost):
            replica.product(Call(0, Direction.FORWARD, Arithmetic.RING), torch.zeros(1, 32, dtype=torch.int32))
        os.close(replica._weights)


@pytest.mark.slow
def test_one_that_hangs_is_lost_in_time(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is stopped in the middle of a product. In time, the caller may give the product to another
    replica."""
    with one_process(served_model) as replica:
        call = Call(0, Direction.FORWARD, Arithmetic.RING)
        rows = rows_of(served_model, call, 3)
        assert torch.equal(replica.product(call, rows), served_model.compute(call, rows))
        monkeypatch.setattr("provider.shards.process.product_limit_s", lambda num_products: 0.5)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGSTOP)
        with pytest.raises(ReplicaLost) as caught:
            replica.product(call, rows)
        assert caught.value.began
        with pytest.raises(ReplicaLost) as caught:
            replica.product(call, rows)
        assert not caught.value.began
    assert "was lost (it was ended)" in caplog.text, "its status would be that of our own kill"


@pytest.mark.slow
def test_one_that_fails_again_and_again_is_lost(served_model: ServedModel) -> None:
    with one_process(served_model) as replica:
        assert replica.pid is not None
        call = Call(0, Direction.FORWARD, Arithmetic.RING)
        rows = rows_of(served_model, call, 40_000)
        resource.prlimit(replica.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))  # the process gets no more memory
        for _ in range(3):
            with pytest.raises((RemoteFault, ReplicaLost)):
                replica.product(call, rows)
        with pytest.raises(ReplicaLost):
            replica.product(call, rows)
        assert replica.revive(threading.Event())
        assert torch.equal(replica.product(call, rows), served_model.compute(call, rows))


@pytest.mark.slow
def test_a_start_that_fails_half_way_leaves_nothing(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_process(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("provider.shards.process.subprocess.Popen", no_process)
        with pytest.raises(ConfigurationError, match="cannot be started: Resource temporarily"):
            LocalShards.start(served_model.served, 1, 1)
    assert not list(tmp_path.iterdir())
    long = tmp_path / ("x" * 100)  # a socket's path cannot be so long
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    LocalShards.start(served_model.served, 1, 1).close()


@pytest.mark.slow
def test_processes_end_with_the_front_and_not_with_its_signals(served_model: ServedModel) -> None:
    shards = LocalShards.start(served_model.served, 2, 2)
    replicas = [*shards.replicas[0], *shards.replicas[1]]
    pids = [replica.pid for replica in replicas]
    assert len(set(pids)) == 4
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    rows = rows_of(served_model, call, 2)
    for replica in shards.replicas[0]:
        assert torch.equal(replica.product(call, rows), served_model.compute(call, rows))
    process = replicas[0]._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # the end of the front has the same effect
    process.wait(timeout=WAIT_S)
    shards.close()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_weights_that_were_changed_are_refused(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from provider.shards import local

    def tampered(groups: object, parent: Path | None) -> int:
        for group in groups:  # type: ignore[attr-defined]
            group.quantised[0, 0] ^= 1
        try:
            return write(groups, parent)  # type: ignore[arg-type]
        finally:
            for group in groups:  # type: ignore[attr-defined]
                group.quantised[0, 0] ^= 1

    write = local.write_weights
    monkeypatch.setattr(local, "write_weights", tampered)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="shard 0-0 could not be started"):
        LocalShards.start(served_model.served, 1, 1)
    assert time.monotonic() - began < 60


def test_a_disk_that_cannot_be_written(served_model: ServedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written to disk"):
        LocalShards.start(served_model.served, 1, 1, parent=tmp_path / "missing")


def test_a_plan_is_whole_and_even(served_model: ServedModel) -> None:
    groups = served_model.manifest().groups
    sizes = [group.in_features * group.out_features for group in groups]
    for num_shards in range(1, len(groups) + 1):
        plan = make_plan(groups, num_shards)
        assert [one for shard in plan for one in shard] == [group.id for group in groups]
        assert all(plan)
        assert len(plan) == num_shards
        largest = max(sum(sizes[one] for one in shard) for shard in plan)
        assert largest <= sum(sizes) / num_shards + max(sizes)
    with pytest.raises(ConfigurationError, match="as many as layer groups"):
        make_plan(groups, len(groups) + 1)


def test_a_model_in_the_tenants_process_computes_in_shards_of_its_own(
    served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A process that is killed is started again, once for all threads that wait for it, and gets the same rows."""
    folder: Path = tmp_path_factory.mktemp("sharded") / "gpt2"
    make_tiny("gpt2", folder)
    sharded = serve_in_process(str(folder), num_shards=2)
    assert isinstance(sharded, ShardedModel)
    try:
        assert sharded.manifest().groups == served_model.manifest().groups
        assert not sharded.served.groups, "the weights are in the processes only"
        call = Call(0, Direction.BACKWARD, Arithmetic.RING)
        rows = rows_of(served_model, call, 5)
        expected = served_model.compute(call, rows)
        assert torch.equal(sharded.compute(call, rows), expected)
        (lost, *_), *others = sharded._shards.replicas
        assert lost.pid is not None
        os.kill(lost.pid, signal.SIGKILL)
        with ThreadPoolExecutor(4) as threads:
            replies = list(threads.map(lambda _: sharded.compute(call, rows), range(4)))
        assert all(torch.equal(reply, expected) for reply in replies)
        assert len(lost._restarts) == 1
        with pytest.raises(UnknownLayer):
            sharded.compute(Call(1000, Direction.FORWARD, Arithmetic.RING), rows)
        with pytest.raises(InvalidTensor):
            sharded.compute(call, rows[:, :3])
        pids = [lost.pid, others[0][0].pid]
    finally:
        sharded.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with pytest.raises(RemoteFault):
        sharded.compute(call, rows)
