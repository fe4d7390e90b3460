"""Tests that a tenant's step is the same, to the last bit, in every place of docs/placement.md: in the provider's
process, on its host, in a process group of its own, on another host, and on a core that the provider may not use. Each
place is tested with a provider of one process and with one of two shards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.link import ADDRESSES, Hosts, NoNamespaces
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from tests.support import waiting
from tests.support.commands import Serving
from tests.support.placed_tenant import Tenants
from tests.support.repository import ROOT
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Root:
    """Describes a running provider.

    Attributes:
        folder: the folder with the provider's socket, in `ipc`, and a tenant's identity, `acme`.
        url: the provider's URL.
        hosts: the two hosts, of which the provider is on the first; None if this user or kernel cannot make hosts.
    """

    folder: Path
    url: str
    hosts: Hosts | None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("placement") / "tiny"
    make_tiny("llama", folder)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["plain", "2 shards"])
def root(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    folder = tmp_path_factory.mktemp("root")
    with contextlib.ExitStack() as stack:
        hosts: Hosts | None = None
        with contextlib.suppress(NoNamespaces):
            hosts = stack.enter_context(Hosts())
        options = ["--tls", "--port", 0, "--model", model, "--state", folder / "state", "--ipc", folder / "ipc"]
        with contextlib.nullcontext() if hosts is None else hosts.inside(0):
            host = "127.0.0.1" if hosts is None else ADDRESSES[0]
            serving = Serving(*options, "--host", host, "--shards", request.param)
        try:
            enroll(StateDir(folder / "state"), "acme", folder / "acme", serving.url)
            yield Root(folder, serving.url, hosts)
        finally:
            code, _, err = serving.stop()
    assert code == 0, err
    assert not (folder / "ipc" / "veilbase.sock").exists()


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    started = Tenants()
    yield started
    started.end()


def digest(url: str, identity: Path, cache: Path, launcher: Sequence[str] = (), core: int | None = None) -> str:
    """Returns the digest of a tenant's step, which is taken by a command of its own without a GPU.

    Args:
        url, identity: the provider and the tenant's identity.
        cache: an empty folder.
        launcher: the arguments of Python that start the module, torchrun's for several ranks.
        core: the only core that the process may use; None allows all.
    """
    command = [sys.executable, *launcher, "-m", "tests.support.placed_tenant", url, str(identity), str(cache)]
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=waiting.limit_s, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def expected(tenants: Tenants, model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Provides the digest of a step with the provider in the tenant's process."""
    found = tenants.digest(f"inproc:{model}", None, tmp_path_factory.mktemp("cache"))
    assert len(found) == 64
    return found


def test_in_the_providers_process_with_shards(tenants: Tenants, model: Path, expected: str, tmp_path: Path) -> None:
    assert tenants.digest(f"inproc:{model}?shards=2", None, tmp_path) == expected


def test_on_the_providers_host_by_the_socket(tenants: Tenants, root: Root, expected: str, tmp_path: Path) -> None:
    assert tenants.digest(f"ipc:{root.folder / 'ipc'}", root.folder / "acme", tmp_path) == expected


def test_on_the_providers_host_by_tcp(tenants: Tenants, root: Root, expected: str, tmp_path: Path) -> None:
    host = None if root.hosts is None else root.hosts.path(0)
    assert tenants.digest(root.url, root.folder / "acme", tmp_path, host) == expected


def test_in_a_process_group_of_its_own(root: Root, expected: str, tmp_path: Path) -> None:
    """Two ranks are one tenant, and compare their results through their group."""
    assert digest(f"ipc:{root.folder / 'ipc'}", root.folder / "acme", tmp_path, TORCHRUN) == expected


def test_two_process_groups_on_one_host(model: Path, expected: str, tmp_path: Path) -> None:
    """The provider's ranks are a group, each with a part of every layer, and the tenant's ranks are another one."""
    state, here = StateDir(tmp_path / "state"), tmp_path / "ipc"
    options = ["--tls", "--port", "0", "--model", str(model), "--state", str(state.path), "--ipc", str(here)]
    command = [sys.executable, *TORCHRUN, "-m", "provider", "serve", *options, "--parallel", "tensor"]
    with (tmp_path / "log").open("w") as log:
        provider = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    try:
        assert provider.stdout is not None
        line = provider.stdout.readline()
        assert line.startswith("ready "), (tmp_path / "log").read_text()
        enroll(state, "acme", tmp_path / "acme", line.split()[1])
        assert digest(f"ipc:{here}", tmp_path / "acme", tmp_path / "cache", TORCHRUN) == expected
    finally:
        provider.send_signal(signal.SIGTERM)
        provider.communicate(timeout=waiting.limit_s)


def test_on_another_host(tenants: Tenants, root: Root, expected: str, tmp_path: Path) -> None:
    if root.hosts is None:
        pytest.skip("this user or kernel cannot make network namespaces")
    assert tenants.digest(root.url, root.folder / "acme", tmp_path, root.hosts.path(1)) == expected


def test_without_a_gpu_on_one_core(root: Root, expected: str, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    assert digest(f"ipc:{root.folder / 'ipc'}", root.folder / "acme", tmp_path, core=core) == expected
