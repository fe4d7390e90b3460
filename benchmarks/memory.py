"""Measures whether the provider's memory grows with the number of steps or with the number of fine-tuning tenants.

Light tenants have no model. They send the requests of a fine-tuning step of 512 tokens in order, one at a time: forward
through all layer groups, then backward through all. This takes minutes, while real tenants would take hours. Only the
first three blocks of the model are served, since only the number of calls matters.
`python -m benchmarks.memory finetune` runs real tenants on the whole model, for a few steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ModelPasses, Worker, provider, rss_mb, serve_worker
from benchmarks.finetune_step import step_of

ROWS = 512
BLOCKS = "model.layers.[0-2].*"
NUM_TENANTS = (1, 2, 4, 8, 16)
REAL_TENANTS = ("a", "b", "c")


@dataclass(frozen=True)
class Found:
    """Holds the provider's resident memory, in MB, after each step, for one number of fine-tuning tenants."""

    tenants: int
    after_step: list[float]

    @property
    def settled(self) -> float:
        """Returns the median memory over the second half of the steps, in MB."""
        return statistics.median(self._second_half())

    @property
    def slope(self) -> float:
        """Returns the growth in MB per step over the second half of the steps, by least squares; NaN if that half is a
        single step."""
        half = self._second_half()
        return statistics.linear_regression(range(len(half)), half).slope if len(half) > 1 else float("nan")

    def _second_half(self) -> list[float]:
        return self.after_step[len(self.after_step) // 2 :]


def _light_step(url: str, folder: Path, name: str) -> Callable[[], None]:
    """Returns a function that sends the requests of one step of the tenant `name`, with random rows in ring
    arithmetic."""
    from wire.transport.grpc_connection import GrpcConnection
    from wire.transport.identity import TlsIdentity

    passes = ModelPasses(GrpcConnection(url, TlsIdentity.read(folder / name)), ROWS)

    def step() -> None:
        passes.forward()
        passes.backward()

    return step


def run(steps: int = 40, blocks: str = BLOCKS) -> tuple[float, list[Found]]:
    """Returns two results: the memory, in MB, of a provider that is ready, and the measurements for each number of
    light tenants.

    All tenants take their steps at the same time.
    """
    names = tuple(f"tenant{number}" for number in range(max(NUM_TENANTS)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, pid = stack.enter_context(provider(folder, "--base-layers", blocks, tenants=names))
        ready = rss_mb(pid)
        found: list[Found] = []
        tenants = [_light_step(url, folder, name) for name in names]
        with ThreadPoolExecutor(len(names)) as threads:
            for number in NUM_TENANTS:
                after_step = []
                for _ in range(steps):
                    for done in [threads.submit(step) for step in tenants[:number]]:
                        done.result()
                    after_step.append(rss_mb(pid))
                found.append(Found(number, after_step))
    return ready, found


def _finetune_tenant(url: str, folder: str, name: str) -> None:
    """Runs one real tenant, as a `Worker` process."""
    import tenant_sdk

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(url, identity=Path(folder) / name, mask="off", cache=folder) as client:
        serve_worker(step_of(client.load_model()))


def run_finetune(steps: int = 6) -> tuple[float, list[Found]]:
    """Returns the same as `run`, but for real tenants on the whole model. These take their steps one after the
    other."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, pid = stack.enter_context(provider(Path(folder), tenants=REAL_TENANTS))
        ready = rss_mb(pid)
        found: list[Found] = []
        workers: list[Any] = []
        for name in REAL_TENANTS:
            workers.append(stack.enter_context(Worker(__name__, "tenant", url, folder, name)))
            after_step = []
            for _ in range(steps):
                for worker in workers:
                    worker.run()
                after_step.append(rss_mb(pid))
            found.append(Found(len(workers), after_step))
    return ready, found


def report(ready: float, found: list[Found]) -> None:
    """Prints the results as a table."""
    print(f"provider ready: {ready:.0f} MB resident")
    print("| tenants at once | first step, MB | settled, MB | MB a step | above the line before |")
    print("|---|---|---|---|---|")
    before = ready
    for one in found:
        grown = one.settled - before
        print(f"| {one.tenants} | {one.after_step[0]:.0f} | {one.settled:.0f} | {one.slope:.2f} | {grown:+.0f} |")
        before = one.settled


def main() -> None:
    """Measures the light tenants and prints their table."""
    report(*run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["tenant"]:
        _finetune_tenant(*sys.argv[2:])
    elif sys.argv[1:2] == ["finetune"]:
        report(*run_finetune())
    else:
        main()
