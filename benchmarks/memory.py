"""Provider memory over steps and over fine-tuning tenants: it should not grow with either."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, provider, rss_mb, serve_worker
from benchmarks.finetune_step import step_of

TENANTS = ("a", "b", "c")


def remote(url: str, folder: str, name: str) -> None:
    """A worker's life: one tenant."""
    from tenant_sdk import TenantClient

    with TenantClient(url, identity=Path(folder) / name, mask="off", cache=folder) as client:
        serve_worker(step_of(client.load_model()))


def run(steps: int = 6) -> list[tuple[str, float]]:
    """(when, provider's resident MB)."""
    found: list[tuple[str, float]] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, pid = stack.enter_context(provider(Path(folder), tenants=TENANTS))
        found.append(("ready", rss_mb(pid)))
        workers: list[Any] = []
        for count, name in enumerate(TENANTS, 1):
            workers.append(stack.enter_context(Worker(__name__, "remote", url, folder, name)))
            for step in range(1, steps + 1):
                for worker in workers:
                    worker.run()
                if step in (1, steps):
                    found.append((f"{count} fine-tuning, step {step}", rss_mb(pid)))
    return found


def main() -> None:
    """Prints a table."""
    print("| provider, SmolLM2-135M int8 | resident MB |\n|---|---|")
    for when, value in run():
        print(f"| {when} | {value:.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["remote"]:
        remote(*sys.argv[2:])
    else:
        main()
