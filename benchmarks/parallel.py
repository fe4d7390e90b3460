"""Compares the ways to run a provider by rows per second through all layers, and by memory.

The ways are one process, shards, replicas, tensor parallelism, FSDP2, a Ray cluster, and two providers behind a load
balancer. All providers run at once and receive requests in turn, with mTLS on loopback, in ring arithmetic. Each
process has one thread. The provider of one process is also measured with two threads. Memory is the PSS of each
process, so that a page that several processes share is counted once in their sum. Ranks, which are the processes of a
parallel provider, communicate by gloo over loopback, which is faster than a real network.

The command is `python -m benchmarks.parallel [--repeats 5] [--ray HOST:PORT]`. `--ray` needs Ray's variables in the
environment, and a Ray cluster whose head is at that address (docs/ray.md). Without `--ray`, the Ray cluster is left
out. The balancer is HAProxy, which passes connections of gRPC on as they are (docs/operations.md). If HAProxy is not
installed, the balancer is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ModelPasses, child_pids, interleaved, pss_mb

NUM_ROWS = (1, 512)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WAYS = {
    "one process, 1 thread": ((), ("--threads", "1")),
    "one process, 2 threads": ((), ("--threads", "2")),
    "2 shards": ((), ("--threads", "1", "--shards", "2")),
    "2 replicas": ((), ("--threads", "1", "--replicas", "2")),
    "tensor parallel, 2 ranks": (TORCHRUN, ("--threads", "1", "--parallel", "tensor")),
    "FSDP2, 2 ranks": (TORCHRUN, ("--threads", "1", "--parallel", "fsdp")),
}
PEER = "one process, 2 threads"


RAY = "2 shards as Ray actors"
BALANCED = "2 providers behind HAProxy"
HAPROXY = """
defaults
  mode tcp
  timeout connect 5s
  timeout client 1h
  timeout server 1h
listen providers
  bind 127.0.0.1:{port}
"""


@dataclass
class _Served:
    """Holds a running provider and its figures.

    Attributes:
        url: the URL that tenants use.
        identity: the folder of the tenant's identity.
        pids: the ids of the provider's processes.
        ready_mb: the PSS of each process in MB, before the first request.
        seconds: the seconds of each pass, by (number of rows, direction).
    """

    url: str
    identity: Path
    pids: list[int]
    ready_mb: list[float] = field(default_factory=list)
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)


@contextlib.contextmanager
def serve(folder: Path, launcher: tuple[str, ...], options: tuple[str, ...]) -> Iterator[_Served]:
    """Starts a provider of SmolLM2-135M, and stops it at the end of the context. Raises SystemExit if it does not
    start.

    Args:
        folder: the folder with the tenant's identity in `tenant`; the provider's log is written there.
        launcher: arguments of Python that start several processes, such as those of torchrun; empty for one process.
        options: options of `provider serve`.
    """
    command = [sys.executable, *launcher, "-m", "provider", "serve", "--tls", "--port", "0"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise SystemExit((folder / "log").read_text()[-2000:])
        pids = [*([] if launcher else [process.pid]), *child_pids(process.pid)]
        yield _Served(line.split()[1], folder / "tenant", pids)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def enrolled(folder: Path, ray_address: str | None) -> tuple[str, ...]:
    """Enrols a tenant, and returns the options with which a provider admits it. A provider on a Ray cluster must not
    hold the certificate authority's key, so it gets a server certificate and a copy of the registry."""
    from provider.identity.authority import StateDir
    from provider.identity.front import export_registry, export_server_identity
    from provider.identity.registry import enroll

    state = StateDir(folder / "authority")
    enroll(state, "tenant", folder / "tenant", "grpcs://127.0.0.1:8443")
    if ray_address is None:
        return ("--state", str(state.path))
    front = folder / "front"
    export_server_identity(state, front, "127.0.0.1")
    export_registry(state, front / "registry")
    return (
        *("--engine", "ray", "--ray-address", ray_address, "--state", str(folder / "own")),
        *("--server-cert", str(front / "server_cert.pem"), "--server-key", str(front / "server_key.pem")),
        *("--registry", str(front / "registry")),
    )


@contextlib.contextmanager
def balancer(folder: Path, urls: list[str]) -> Iterator[str]:
    """Runs HAProxy before providers that share a state directory, and yields the URL of all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [f"  server p{number} {url.rpartition('/')[2]}" for number, url in enumerate(urls)]
    (folder / "haproxy.cfg").write_text(HAPROXY.format(port=port) + "\n".join(servers) + "\n")
    process = subprocess.Popen(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        yield f"grpcs://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def run(repeats: int, ray_address: str | None = None) -> dict[str, _Served]:
    """Measures every provider of `WAYS`, and two providers behind HAProxy if it is installed. All of them take turns.
    Returns the providers with their figures, by name.

    Args:
        repeats: the number of rounds.
        ray_address: the address of a Ray cluster's head for one more provider; None leaves it out.
    """
    from wire.transport.grpc_connection import GrpcConnection
    from wire.transport.identity import TlsIdentity

    ways: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = (
        WAYS if ray_address is None else WAYS | {RAY: ((), ("--threads", "1", "--shards", "2"))}
    )
    with contextlib.ExitStack() as stack:
        found = {}
        for name, (launcher, options) in ways.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            access = enrolled(folder, ray_address if name == RAY else None)
            found[name] = stack.enter_context(serve(folder, launcher, (*access, *options)))
        if shutil.which("haproxy"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = (*enrolled(folder, None), "--threads", "1", "--tensor-port", "none")
            both = [stack.enter_context(serve(folder, (), options)) for _ in range(2)]
            url = stack.enter_context(balancer(folder, [one.url for one in both]))
            found[BALANCED] = _Served(url, both[0].identity, [pid for one in both for pid in one.pids])
        for one in found.values():
            one.ready_mb = [pss_mb(pid) for pid in one.pids]
        for num_rows in NUM_ROWS:
            connections = {name: GrpcConnection(one.url, TlsIdentity.read(one.identity)) for name, one in found.items()}
            runs = {name: ModelPasses(connection, num_rows) for name, connection in connections.items()}
            for direction in ("forward", "backward"):
                seconds = interleaved({name: getattr(run, direction) for name, run in runs.items()}, repeats)
                for name, values in seconds.items():
                    found[name].seconds[num_rows, direction] = values
    return found


def report(found: dict[str, _Served]) -> None:
    """Prints the results as a table."""
    columns = list(found[PEER].seconds)
    print(f"rows a second (time relative to {PEER}: median over the pairs)")
    print("| | " + " | ".join(f"{rows} {direction}" for rows, direction in columns) + " | MB a process when ready |")
    print("|---" * (len(columns) + 2) + "|")
    for name, one in found.items():
        cells = []
        for column in columns:
            own, peer = one.seconds[column], found[PEER].seconds[column]
            ratio = statistics.median(a / b for a, b in zip(own, peer, strict=True))
            cells.append(f"{column[0] / statistics.median(own):.1f} ({ratio:.2f}×)")
        print(f"| {name} | " + " | ".join(cells) + f" | {', '.join(f'{mb:.0f}' for mb in one.ready_mb)} |")


def main() -> None:
    """Measures all providers and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5, help="the number of rounds")
    parser.add_argument("--ray", metavar="HOST:PORT", help="the head of a Ray cluster, which is measured too")
    given = parser.parse_args()
    report(run(given.repeats, given.ray))


if __name__ == "__main__":
    main()
