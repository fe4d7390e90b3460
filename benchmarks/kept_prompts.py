"""Measures the time to the first token of a long prompt, with and without its beginning in the engine's prefix cache.

Provider and tenant are processes on one machine, joined by mTLS, with SmolLM2-135M as base and no mask. Prompts with a
kept beginning and prompts that begin anew take turns, and the figures are medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import provider

ROUNDS = 5
DOCUMENT = "The tide gauge at the old harbour was read every hour, and each reading was written into a ledger. " * 20


def first_token_s(engine: Any, text: str, caller: str) -> tuple[float, Any]:
    """Returns the seconds from a request to its first token, and the answer."""
    began, times = time.perf_counter(), list[float]()

    def clock(_: Any, logits: Any) -> Any:
        times.append(time.perf_counter())
        return logits

    answer = engine.submit(text, max_new_tokens=1, logits_processor=[clock], caller=caller)
    answer.result()
    return times[0] - began, answer


def main() -> None:
    """Runs the benchmark and prints its result as a table."""
    import tenant_sdk

    tenant_sdk.tune()
    with (
        tempfile.TemporaryDirectory() as folder,
        provider(Path(folder)) as (url, _),
        tenant_sdk.TenantClient(
            url, identity=Path(folder) / "bench", mask="off", arithmetic="ring", cache=folder, progress=False
        ) as client,
        tenant_sdk.Engine(client, prefix_bytes=1 << 28) as engine,
    ):
        first_token_s(engine, DOCUMENT, "kept")
        kept, fresh, reused = [], [], 0
        for number in range(ROUNDS):
            question = f"{DOCUMENT} What was written on day {number}?"
            seconds, answer = first_token_s(engine, question, "kept")
            kept.append(seconds)
            reused = answer.num_reused_tokens
            fresh.append(first_token_s(engine, question, f"new {number}")[0])
    print("| prompt, tokens | of these kept | first token, s | without | ratio |\n|---|---|---|---|---|")
    ratio = statistics.median(a / b for a, b in zip(kept, fresh, strict=True))
    print(
        f"| {answer.num_prompt_tokens} | {reused} | {statistics.median(kept):.2f} | {statistics.median(fresh):.2f} "
        f"| {ratio:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
