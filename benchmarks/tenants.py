"""Compares fine-tuning tenants of one provider with as many local processes, by tokens per second and by memory.

The command is `python -m benchmarks.tenants [throughput | saving]`. With `--carrier ipc` tenants
reach the provider in another way than by the tensor port; `--tenants 4` measures four tenants only. For `throughput`,
local processes run transformers + PEFT. Each tenant, and each local process, has one thread and takes
LoRA steps of 2 × 256 tokens on SmolLM2-135M. All processes of a side, the provider included, run at the same time on
this machine. With up to four tenants, both sides take turns, round after round. Memory is the PSS of processes, so that
a page that several of them share is counted once in their sum.

`saving` repeats a comparison of memory from the papers on shared base models. A provider that saves each layer's input
from the forward pass to the backward pass, as training code does, is compared with the real provider, which saves
nothing. Only this benchmark has a provider that keeps inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ModelPasses, Providers, Worker, local_model, pss_mb, serve_worker
from benchmarks.finetune_step import SHAPE, step_of

NUM_TENANTS = (1, 2, 4, 8)
ROUNDS = 3
_MOST_IN_TURNS = 4
"""The largest number of tenants for which both sides take turns. With more tenants, the processes of both sides would
take more than 24 GiB, so one side is measured after the other."""
BUDGET_MB = 8192
"""The memory of an imaginary machine, in MB. The benchmark says how many adapters can be trained on it at the same
time."""
SAVING_ROWS, SAVING_TENANTS = 512, (1, 2, 4, 6)
"""The rows of each request, and the numbers of tenants, for `saving`. A provider without TLS counts all of them as one
tenant, which may have at most eight calls at a time."""


@dataclass(frozen=True)
class Found:
    """Holds the medians for one number of tenants.

    Attributes:
        tokens_per_s: tokens per second of all tenants, or all local processes, together, by side.
        memory_mb: memory in MB of all processes of a side, including the provider, by side.
        provider_mb: memory in MB of the provider alone.
    """

    tokens_per_s: dict[str, float]
    memory_mb: dict[str, float]
    provider_mb: float


def _step_together(workers: Sequence[Worker], threads: ThreadPoolExecutor) -> float:
    """Lets all workers take one step at the same time, and returns the seconds until the last has finished."""
    began = time.perf_counter()
    for done in [threads.submit(worker.run) for worker in workers]:
        done.result()
    return time.perf_counter() - began


def throughput(numbers: Sequence[int] = NUM_TENANTS, rounds: int = ROUNDS, carrier: str = "") -> dict[int, Found]:
    """Returns the results by number of tenants, and prints a line of the table for each number. For `carrier` see
    `Providers.of`."""
    found = {}
    with ExitStack() as stack:
        sides = _Sides(stack, ("provider", "local"), max(numbers), carrier)
        for number in numbers:
            if number > _MOST_IN_TURNS:
                continue
            sides.grow(number)
            found[number] = sides.look(rounds)
            print(_line(number, found[number]), flush=True)
    for number in numbers:
        if number > _MOST_IN_TURNS:
            found[number] = _one_after_the_other(number, rounds, carrier)
            print(_line(number, found[number]), flush=True)
    return found


def _one_after_the_other(number: int, rounds: int, carrier: str) -> Found:
    looks = []
    for side in ("provider", "local"):
        with ExitStack() as stack:
            sides = _Sides(stack, (side,), number, carrier)
            sides.grow(number)
            looks.append(sides.look(rounds))
    ours, theirs = looks
    return Found(ours.tokens_per_s | theirs.tokens_per_s, ours.memory_mb | theirs.memory_mb, ours.provider_mb)


class _Sides:
    """Runs the processes of one side or of both sides. The side `provider` has tenants and their provider, and the side
    `local` has local processes. If there are both sides, they take turns."""

    def __init__(self, stack: ExitStack, which: Sequence[str], most: int, carrier: str) -> None:
        self._stack, self._workers = stack, {side: list[Worker]() for side in which}
        self._names = tuple(f"tenant{number}" for number in range(most))
        self._threads = stack.enter_context(ThreadPoolExecutor(most))
        if "provider" in which:
            self._provider = Providers(stack, self._names).of(carrier)

    def grow(self, number: int) -> None:
        """Starts processes until each side has `number` of them."""
        for side, workers in self._workers.items():
            for name in self._names[len(workers) : number]:
                arguments = (
                    ("tenant", self._provider.url, self._provider.folder, name) if side == "provider" else ("local",)
                )
                workers.append(self._stack.enter_context(Worker(__name__, *arguments)))

    def look(self, rounds: int) -> Found:
        """Lets all tenants take steps, and returns the median figures of `rounds` rounds.

        One round before them, which warms up new processes, is not counted.
        """
        seconds: dict[str, list[float]] = {side: [] for side in self._workers}
        for repeat in range(rounds + 1):
            for side, workers in self._workers.items():
                took = _step_together(workers, self._threads)
                if repeat:
                    seconds[side].append(took)
        memory = {side: sum(pss_mb(worker.pid) for worker in each) for side, each in self._workers.items()}
        own = pss_mb(self._provider.pid) if "provider" in memory else 0.0
        if "provider" in memory:
            memory["provider"] += own
        tokens = SHAPE[0] * SHAPE[1]
        rates = {side: len(self._workers[side]) * tokens / statistics.median(each) for side, each in seconds.items()}
        return Found(rates, memory, own)


def _line(number: int, one: Found) -> str:
    ratio = one.tokens_per_s["provider"] / one.tokens_per_s["local"]
    memory = one.memory_mb
    return (
        f"| {number} | {one.tokens_per_s['provider']:.0f} | {one.tokens_per_s['local']:.0f} | {ratio:.2f} | "
        f"{memory['provider']:.0f} | {memory['local']:.0f} | {memory['provider'] / memory['local']:.2f} | "
        f"{one.provider_mb:.0f} |"
    )


def tenant(url: str, folder: str, name: str) -> None:
    """Runs one real tenant, as a `Worker` process."""
    import tenant_sdk

    tenant_sdk.tune()
    import torch

    torch.set_num_threads(1)
    with tenant_sdk.TenantClient(url, identity=Path(folder) / name, mask="off", cache=folder) as client:
        serve_worker(step_of(client.load_model()))


def local() -> None:
    """Takes local steps with transformers + PEFT, as a `Worker` process."""
    import torch

    torch.set_num_threads(1)
    serve_worker(step_of(local_model()))


# ---- a provider that keeps what it was sent --------------------------------------------------------------------------


def _serve_saving(kind: str) -> None:
    """Runs a provider on loopback, until standard input ends.

    Args:
        kind: `saving` for a provider that keeps the rows of each forward request until the backward request of the same
            group; `stateless` for the real provider.
    """
    from wire.transport.event_engine import prefer_waiting_in_place

    prefer_waiting_in_place()  # must come before anything imports grpc
    from provider.engine.request import Request
    from provider.model.load import load, resolve
    from provider.model.served_model import ServedModel
    from provider.model.weights import serve_model
    from provider.net.server import Server
    from provider.serve import share_one_heap

    share_one_heap()
    model = ServedModel(serve_model(load(resolve("smollm2-135m"))))
    saved: dict[tuple[Any, int], Any] = {}

    class SavingRequest(Request):
        """Keeps the rows of each forward request until the backward request of the same tenant and group.

        Tenants are told apart by the thread that reads their stream, because here all have the same name.
        """

        def complete(self, rows: Any) -> None:
            """Takes the rows, and keeps them."""
            key = (threading.get_ident(), self.header.call.group)
            if self.header.call.direction:
                saved.pop(key, None)
            else:
                saved[key] = rows
            super().complete(rows)

    if kind == "saving":
        import provider.net.session

        provider.net.session.Request = SavingRequest  # type: ignore[misc]
    server = Server("127.0.0.1", 0, None)
    server.start(model)
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()


def saving(numbers: Sequence[int] = SAVING_TENANTS) -> None:
    """Prints the memory of both kinds of provider after all forward passes and before the backward passes."""
    import subprocess

    from wire.transport.grpc_connection import GrpcConnection

    peaks: dict[str, list[float]] = {}
    for kind in ("stateless", "saving"):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tenants", "serve", kind]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            port = process.stdout.readline().strip() if process.stdout else ""
            connections = [GrpcConnection(f"grpc://127.0.0.1:{port}") for _ in range(max(numbers))]
            passes = [ModelPasses(connection, SAVING_ROWS) for connection in connections]
            peaks[kind] = []
            for number in numbers:
                for one in passes[:number]:
                    one.forward()
                peaks[kind].append(pss_mb(process.pid))
                for one in passes[:number]:
                    one.backward()
            for connection in connections:
                connection.close()
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(timeout=60)
    print(f"| tenants between forward and backward, {SAVING_ROWS} tokens each | keeps nothing, MB | keeps inputs, MB |")
    print("|---|---|---|")
    for number, without, with_inputs in zip(numbers, peaks["stateless"], peaks["saving"], strict=True):
        print(f"| {number} | {without:.0f} | {with_inputs:.0f} |")


def main() -> None:
    """Runs the comparisons that the command line names, by default both, and prints their tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants")
    parser.add_argument("what", nargs="*", help="throughput, saving; by default both")
    parser.add_argument("--carrier", default="", choices=("", "gRPC", "ipc"))
    parser.add_argument("--tenants", nargs="+", type=int, default=NUM_TENANTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    what = given.what or ["throughput", "saving"]
    if "throughput" in what:
        print("| tenants | tokens/s, one provider | tokens/s, local processes | ratio | MB, provider and tenants | "
              "MB, local | ratio | provider's own MB |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
        found = throughput(given.tenants, given.rounds, given.carrier)
        fewest, most = found[min(found)], found[max(found)]
        step = max(found) - min(found)
        for side, own in (("provider", most.provider_mb), ("local", 0.0)) if step else ():
            each = (most.memory_mb[side] - fewest.memory_mb[side]) / step
            print(
                f"{side}: {each:.0f} MB for each further tenant, so {(BUDGET_MB - own) // each:.0f} in {BUDGET_MB} MB"
            )
    if "saving" in what:
        saving()


if __name__ == "__main__":
    if sys.argv[1:2] == ["tenant"]:
        tenant(*sys.argv[2:])
    elif sys.argv[1:2] == ["local"]:
        local()
    elif sys.argv[1:2] == ["serve"]:
        _serve_saving(sys.argv[2])
    else:
        main()
