"""Tests a provider whose products are computed in a Ray cluster of three nodes, with TLS and a token, on a loopback
device of its own: faults of every part, and clusters that are not closed to strangers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.row_watch import SentRows
from provider.identity.authority import StateDir
from provider.identity.front import export_registry, export_server_identity
from provider.identity.registry import enroll
from provider.operations.monitor import read_metrics
from provider.serve import NODE_LOST_EXIT
from tenant_sdk import ProviderAwayWarning, TenantClient
from tenant_sdk.training import checkpoints
from tests.support.commands import Serving, one_line_error, run
from tests.support.identities import ENDPOINT
from tests.support.providers import make_served_model, serving
from tests.support.ray_cluster import (
    RayCluster,
    actor_pids,
    lone_head,
    make_settings,
    node_of,
    private_network,
    why_not,
)
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import WAIT_S, until
from wire.transport.grpc_connection import GrpcConnection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(480),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

STEPS = 12
"""The steps of a run; a checkpoint is saved after every second step, and faults come after checkpoints."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("ray") / "tiny")


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provides a folder with a tenant's identity and with what a provider without the CA's key needs."""
    folder = tmp_path_factory.mktemp("front")
    state = StateDir(folder / "ca")
    enroll(state, "acme", folder / "acme", ENDPOINT)
    export_server_identity(state, folder / "front", "127.0.0.1")
    export_registry(state, folder / "front" / "registry")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(folder))  # Whoever runs the tests may have a CA of their own.
        yield folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with private_network():
        started = RayCluster(tmp_path_factory.mktemp("cluster"), num_nodes=3)
        try:
            yield started
        finally:
            started.close()


def options(cluster_address: str, front: Path, model: Path) -> list[object]:
    files = front / "front"
    return [
        *("--tls", "--engine", "ray", "--ray-address", cluster_address, "--model", model, "--port", 0),
        *("--server-cert", files / "server_cert.pem", "--server-key", files / "server_key.pem"),
        *("--registry", files / "registry", "--state", front / "own"),
    ]


@pytest.fixture
def serve(cluster: RayCluster, front: Path, model: Path) -> Iterator[Callable[..., Serving]]:
    with contextlib.ExitStack() as running:
        given = options(cluster.address, front, model)
        yield lambda *arguments: running.enter_context(Serving(*given, *arguments))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> SentRows:
    """Returns the rows that are sent from now on."""
    monkeypatch.setattr(GrpcConnection, "submit", GrpcConnection.submit)  # so that it is the old one again at the end
    return SentRows()


def finetune(url: str, front: Path, model: Path, out: Path, **changes: Any) -> list[float]:
    """Trains with lattice masks and verification, and returns the losses."""
    identity = None if url.startswith("grpc:") else front / "acme"
    options = {"precision": "exact"}  # so that losses can be compared closely
    with TenantClient(url, identity=identity, mask="lattice", mask_options=options, verify=str(model)) as client:
        return list(client.finetune(ROWS, lora(), str(out), seed=3, **{**QUICK, "max_steps": STEPS, **changes}).losses)


@pytest.fixture(scope="module")
def expected(model: Path, front: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Provides the losses of a run with a provider of one process."""
    with serving(make_served_model(model, "int8")) as server:
        return finetune(f"grpc://127.0.0.1:{server.port}", front, model, tmp_path_factory.mktemp("plain") / "run")


def after_checkpoints(monkeypatch: pytest.MonkeyPatch, faults: dict[int, Callable[[], None]]) -> None:
    """Makes each fault happen once, in the thread that trains, when the checkpoint of its step has been saved."""
    mark = checkpoints._Mark
    on_save = mark.on_save

    def watched(callback: Any, args: Any, state: Any, control: Any, **others: Any) -> None:
        on_save(callback, args, state, control, **others)
        if fault := faults.pop(state.global_step, None):
            fault()

    monkeypatch.setattr(mark, "on_save", watched)


def wait_for_replicas(front: Path, num_replicas: int) -> None:
    """Waits until so many replicas can compute. A request that was lost twice would rightly be refused, so the next
    fault must not come while the last one is being mended."""

    def num_live() -> float:
        families = text_string_to_metric_families(read_metrics(front / "own"))
        samples = [sample for family in families if family.name == "veilbase_replicas" for sample in family.samples]
        return sum(sample.value for sample in samples if sample.labels["state"] == "live")

    until(lambda: num_live() == num_replicas, "all replicas")


def close_to(losses: list[float]) -> Any:
    return pytest.approx(losses, abs=5e-3)  # the masks differ, so losses differ by rounding


def test_lost_stopped_and_removed_actors_change_nothing(
    serve: Callable[..., Serving],
    cluster: RayCluster,
    front: Path,
    model: Path,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: SentRows,
) -> None:
    provider = serve("--shards", 2, "--replicas", 2)
    assert len(actor_pids()) == 4

    def kill() -> None:
        os.kill(actor_pids()[0], signal.SIGKILL)

    def stop() -> None:
        wait_for_replicas(front, 4)
        os.kill(actor_pids()[0], signal.SIGSTOP)

    def remove_a_node() -> None:
        wait_for_replicas(front, 4)
        cluster.remove(next(node for pid in actor_pids() if (node := node_of(pid)) != cluster.head))

    faults = {2: kill, 4: stop, 6: remove_a_node}
    after_checkpoints(monkeypatch, faults)
    assert finetune(provider.url, front, model, tmp_path / "run") == close_to(expected)
    assert not faults
    num_rows, num_twice = sent.counts()
    assert num_rows > 1000
    assert num_twice == 0
    cluster.add_node()
    until(lambda: len(actor_pids()) == 4, "all actors")  # Ray may take 20 s to notice that a host is lost.
    wait_for_replicas(front, 4)
    code, out, err = provider.stop()
    assert (code, out) == (0, "")
    assert "did not answer in time" in err
    assert "was lost" in err
    assert "Traceback" not in err
    until(lambda: not actor_pids(), "the end of all actors")


def test_without_its_nodes_store_the_provider_ends_and_a_run_waits_for_the_next(
    serve: Callable[..., Serving],
    cluster: RayCluster,
    front: Path,
    model: Path,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: SentRows,
) -> None:
    provider = serve("--shards", 1, "--replicas", 2)
    port = provider.url.rpartition(":")[2]

    def start_again() -> None:
        for _ in range(2):
            cluster.add_node()
        serve("--shards", 1, "--replicas", 2, "--port", port)

    starter = threading.Thread(target=start_again)

    def end_the_stores() -> None:
        for node in list(cluster.nodes):
            cluster.remove(node)
        os.kill(cluster.head, signal.SIGKILL)
        provider.process.wait(WAIT_S)
        starter.start()

    after_checkpoints(monkeypatch, {6: end_the_stores})
    with pytest.warns(ProviderAwayWarning):
        losses = finetune(provider.url, front, model, tmp_path / "run", provider_wait_s=3 * WAIT_S)
    starter.join(WAIT_S)
    assert losses == close_to(expected)
    assert sent.counts()[1] == 0
    assert provider.process.returncode == NODE_LOST_EXIT
    _, _, err = provider.stop()
    assert "this host's Ray node has ended" in err
    until(lambda: len(actor_pids()) == 2, "the end of the lost node's actors")


def test_actors_that_no_host_can_take(cluster: RayCluster, front: Path, model: Path) -> None:
    done = run("serve", *options(cluster.address, front, model), "--replicas", 2, "--ray-gpus", 1)
    assert done.returncode == 1
    assert "no room for 2 actors" in done.stderr.splitlines()[-1]  # Ray's own lines come before it.
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"RAY_AUTH_MODE": "disabled"}, "answers without a token"), ({"RAY_USE_TLS": "0"}, "does not speak TLS")],
)
def test_a_cluster_that_lets_strangers_in_is_refused(
    changes: dict[str, str], text: str, front: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path / "ray")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with private_network(), lone_head({**os.environ, **changes}, 6379) as address:
        done = run("serve", *options(address, front, model))
    assert text in one_line_error(done)
