"""Compares five ways to run a provider: one process, shards, replicas, tensor parallel and FSDP2.

The figures are rows per second through all layers, and memory. All providers run at once and receive requests in turn,
over gRPC on loopback, in ring arithmetic. Each process has one thread. The provider of one process is also measured
with two threads. Memory is the PSS of each process, so that a page that several processes share is counted once in
their sum. Ranks, which are the processes of a parallel provider, communicate by gloo over loopback, which is faster
than a real network.
"""

from __future__ import annotations

import contextlib
import signal
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


@dataclass
class Served:
    """Holds a running provider and its figures: memory of each process, and seconds of each pass by rows and
    direction."""

    url: str
    pids: list[int]
    ready_mb: list[float] = field(default_factory=list)
    seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)


@contextlib.contextmanager
def serve_without_tls(folder: Path, launcher: tuple[str, ...], options: tuple[str, ...]) -> Iterator[Served]:
    """Starts a provider of SmolLM2-135M without TLS, and stops it at the end of the context."""
    command = [sys.executable, *launcher, "-m", "provider", "serve", "--port", "0", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise SystemExit((folder / "log").read_text()[-2000:])
        yield Served(line.split()[1], [*([] if launcher else [process.pid]), *child_pids(process.pid)])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def run(repeats: int) -> dict[str, Served]:
    """Measures every provider of `WAYS`, all of which take turns, and returns them by name."""
    from wire.transport.grpc_connection import GrpcConnection

    with contextlib.ExitStack() as stack:
        found = {}
        for name, (launcher, options) in WAYS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found[name] = stack.enter_context(serve_without_tls(folder, launcher, options))
        for one in found.values():
            one.ready_mb = [pss_mb(pid) for pid in one.pids]
        for num_rows in NUM_ROWS:
            runs = {name: ModelPasses(GrpcConnection(one.url), num_rows) for name, one in found.items()}
            for direction in ("forward", "backward"):
                seconds = interleaved({name: getattr(run, direction) for name, run in runs.items()}, repeats)
                for name, values in seconds.items():
                    found[name].seconds[num_rows, direction] = values
    return found


def report(found: dict[str, Served]) -> None:
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


def main(repeats: int = 5) -> None:
    """Measures all providers and prints the table."""
    report(run(repeats))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
