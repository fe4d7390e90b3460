"""Tests a provider whose layers are in several processes: a tenant sees no difference, and survives the loss of a
process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.engine.profile import make_scheduler
from provider.net.server import Server
from provider.schedule.fairness import Policy
from provider.shards.local import LocalShards
from provider.shards.router import Shard
from tenant_sdk import TenantClient
from tenant_sdk.training import checkpoints
from tests.support.commands import Serving, one_line_error, run
from tests.support.providers import make_served_model, serving
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import comes, until
from wire.errors import Unavailable
from wire.frame import Arithmetic, Call, Direction
from wire.payload import RowsPayload
from wire.transport.grpc_connection import GrpcConnection

pytestmark = pytest.mark.slow

Serve = Callable[..., Serving]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("shards") / "tiny")


@pytest.fixture
def serve(model: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as running:
        yield lambda *arguments: running.enter_context(Serving("--model", model, "--port", 0, *arguments))


def workers(serving: Serving) -> list[int]:
    """Returns the shards' processes in the order in which they started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == serving.process.pid and b"provider.shards.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def finetune(url: str, out: Path, mask: str, **changes: Any) -> list[float]:
    # rows go unrounded, so that losses can be compared closely
    options = {"mask_options": {"precision": "exact"}} if mask == "lattice" else {}
    with TenantClient(url, mask=mask, **options) as client:
        result = client.finetune(ROWS, lora(), str(out), seed=3, **{**QUICK, "max_steps": 24, **changes})
    return list(result.losses)


class Killer:
    """Kills processes in the middle of a run, after its first checkpoint. The run waits after its checkpoint of step 12
    until they are killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path, pids: list[int]) -> None:
        self._pids, self._has_begun, self._is_done = pids, threading.Event(), threading.Event()
        folder, on_save = checkpoints.checkpoints_folder(out), checkpoints._Mark.on_save

        def watched(callback: Any, args: Any, state: Any, control: Any, **options: Any) -> None:
            on_save(callback, args, state, control, **options)
            if callback._folder == folder:
                self._has_begun.set()
                if state.global_step >= 12:
                    comes(self._is_done, "the kill")

        monkeypatch.setattr(checkpoints._Mark, "on_save", watched)
        threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        comes(self._has_begun, "the first checkpoint")
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._is_done.set()

    def join(self) -> None:
        comes(self._is_done, "the kill")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Provides the losses of a run with a provider of one process."""
    with serving(make_served_model(model, "int8")) as server:
        return finetune(f"grpc://127.0.0.1:{server.port}", tmp_path_factory.mktemp("plain") / "run", "off")


def test_a_replica_that_is_lost_in_mid_run_changes_nothing(
    serve: Serve, tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = serve("--shards", 2, "--replicas", 2)
    assert finetune(sharded.url, tmp_path / "sharded", "off") == expected

    pids = workers(sharded)
    assert len(pids) == 4
    killer = Killer(monkeypatch, tmp_path / "one lost", pids[::2])  # kills one replica of each shard
    assert finetune(sharded.url, tmp_path / "one lost", "off") == expected
    killer.join()

    until(lambda: len(workers(sharded)) == 4 and not set(pids[::2]) & set(workers(sharded)), "both, started again")
    killer = Killer(monkeypatch, tmp_path / "masked", workers(sharded)[:1])
    masked = finetune(sharded.url, tmp_path / "masked", "lattice")
    killer.join()
    assert masked == pytest.approx(expected, abs=5e-3)  # the masks differ, so losses differ by rounding

    pids = workers(sharded)
    code, out, err = sharded.stop()
    assert (code, out) == (0, "")
    assert err.count("was lost") >= 3, "two replicas in the plain run, one in the masked one"
    assert "Traceback" not in err
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_shard_without_a_replica_is_waited_for(
    serve: Serve, tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = serve("--shards", 2)
    killer = Killer(monkeypatch, tmp_path / "run", workers(sharded)[1:])
    assert finetune(sharded.url, tmp_path / "run", "off") == expected
    killer.join()
    code, _, err = sharded.stop()
    assert code == 0
    assert "was started again" in err


def test_layers_of_other_shards_go_on(model: Path) -> None:
    """If a shard is given up, requests for it fail at once, and requests for the other shard are still served."""
    served_model = make_served_model(model, "int8")
    local = LocalShards.start(served_model.served, 2, 1)
    schedulers = [make_scheduler(served_model.served, Policy(), profiled=False) for _ in range(2)]
    served_model.let_weights_go()
    server = Server("127.0.0.1", 0, None)
    server.start(served_model, [Shard(*one) for one in zip(local.plan, local.replicas, schedulers, strict=True)])
    connection = GrpcConnection(f"grpc://127.0.0.1:{server.port}")

    def product(group: int, num_rows: int = 20) -> torch.Tensor:
        info = connection.manifest().groups[group]
        rows = torch.ones(num_rows, info.in_features, dtype=torch.int32)
        return connection.submit(
            Call(group, Direction.FORWARD, Arithmetic.RING), RowsPayload(rows), info.out_features
        ).result()

    try:
        last = len(connection.manifest().groups) - 1
        product(0)
        expected = product(last)
        first = local.replicas[0][0]
        first._restarts.extend([time.monotonic()] * 5)  # the process counts as restarted as often as allowed
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        for num_rows in (20, 1):
            with pytest.raises(Unavailable, match="has lost what this layer needs"):
                product(0, num_rows)
            assert torch.equal(product(last), expected)
    finally:
        connection.close()
        server.stop()
        local.close()


def test_conflicts_are_one_line(model: Path, tmp_path: Path) -> None:
    base = ("serve", "--model", model, "--port", 0, "--state", tmp_path)
    assert "as many as layer groups" in one_line_error(run(*base, "--shards", 900))
    done = run(*base, "--shards", 0)
    assert "setting shards" in one_line_error(done)


def test_killing_the_front_leaves_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # apart from other tests' shards, with a short path
        monkeypatch.setenv("TMPDIR", folder)
        sharded = serve("--shards", 2)
        pids = workers(sharded)
        sharded.process.kill()
        sharded.process.communicate()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the shards")
        assert not [one for one in Path(folder).glob("veilbase-*") if not one.name.startswith("veilbase-bundle")]
