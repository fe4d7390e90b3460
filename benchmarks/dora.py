"""Measures a DoRA step beside a LoRA step: over a provider, and with local transformers + PEFT.

Provider and tenant share the machine. The provider computes in int8 `ring` arithmetic without a mask. Each side runs in
a process of its own, and the sides take turns. The bytes are those of one step on the wire.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, interleaved, local_model, provider, ratios, serve_worker
from benchmarks.finetune_step import SHAPE, step_of

KINDS = ("LoRA", "DoRA")


def remote_step(url: str, folder: str, kind: str) -> None:
    """Runs one tenant that takes training steps, as a `Worker` process, and writes the traffic of a step to a file."""
    import tenant_sdk

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder) as client:
        step = step_of(client.load_model(), use_dora=kind == "DoRA")
        step()
        before = client.traffic
        step()
        after = client.traffic
        up, down = after.bytes_up - before.bytes_up, after.bytes_down - before.bytes_down
        calls = after.calls - before.calls
        said = f"{kind}: {calls} calls, {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down a step"
        (Path(folder) / kind).write_text(said)
        serve_worker(step)


def run(repeats: int = 5) -> dict[str, Any]:
    """Returns the median seconds of a step by run, the traffic, and median ratios of one run to another."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, _ = stack.enter_context(provider(Path(folder)))
        workers = {}
        for kind in KINDS:
            workers[f"local {kind}"] = stack.enter_context(Worker(__name__, "local", kind))
            workers[f"remote {kind}"] = stack.enter_context(Worker(__name__, "remote", url, folder, kind))
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats)
        traffic = [(Path(folder) / kind).read_text() for kind in KINDS]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "traffic": traffic,
        "remote DoRA / remote LoRA": ratios(seconds, "remote LoRA")["remote DoRA"],
        "local DoRA / local LoRA": ratios(seconds, "local LoRA")["local DoRA"],
        "remote DoRA / local DoRA": ratios(seconds, "local DoRA")["remote DoRA"],
    }


def main() -> None:
    """Runs the benchmark and prints its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dora")
    parser.add_argument("--repeats", type=int, default=5)
    result = run(parser.parse_args().repeats)
    print(f"| step {SHAPE[0]}×{SHAPE[1]} | s |\n|---|---|")
    for name, value in result.pop("seconds").items():
        print(f"| {name} | {value:.2f} |")
    print(*result.pop("traffic"), sep="\n")
    for name, ratio in result.items():
        print(f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        serve_worker(step_of(local_model(), use_dora=sys.argv[2] == "DoRA"))
    elif sys.argv[1:2] == ["remote"]:
        remote_step(*sys.argv[2:])
    else:
        main()
