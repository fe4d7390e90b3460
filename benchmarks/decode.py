"""Measures greedy decoding of one sequence over mTLS loopback, without a mask and with masks ready, against local fp32.

With the mask `lattice`, the masks of a run are made before the clock starts. None are made in the background, so that
no run uses the processor during another run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, interleaved, local_model, provider, ratios, serve_worker

PROMPT_TOKENS, NEW_TOKENS = 32, 24


def decode_of(model: Any, vocabulary: int = 40_000) -> Callable[[], Any]:
    """Returns a function that generates exactly NEW_TOKENS tokens after a fixed prompt. As in the benchmark of Petals,
    the time includes the pass over the prompt."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, vocabulary, (1, PROMPT_TOKENS), generator=generator).to(model.device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}

    def decode() -> Any:
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return decode


def remote(url: str, folder: str, mask: str) -> None:
    """Runs one tenant that decodes, as a `Worker` process."""
    import tenant_sdk

    tenant_sdk.tune()
    options = {"background": False} if mask == "lattice" else {}
    with tenant_sdk.TenantClient(
        url, identity=Path(folder) / "bench", mask=mask, arithmetic="ring", mask_options=options, cache=folder
    ) as client:
        if mask == "lattice":
            client.fetch_hints()
        prepare = (lambda: client.prepare(PROMPT_TOKENS + NEW_TOKENS)) if mask == "lattice" else None
        serve_worker(decode_of(client.load_model()), prepare)


def run(repeats: int = 9) -> dict[str, Any]:
    """Measures all runs. Returns the median seconds of each run, and its median ratio to the local fp32 run."""
    with ExitStack() as stack:
        workers = {"local fp32": stack.enter_context(Worker(__name__, "local"))}
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, _ = stack.enter_context(provider(Path(folder)))
        other = stack.enter_context(tempfile.TemporaryDirectory())
        by_grpc, _ = stack.enter_context(provider(Path(other), "--tensor-port", "none"))
        for name, *where in (
            ("int8 ring, off", url, folder, "off"),
            ("int8 ring, off, by gRPC", by_grpc, other, "off"),
            ("lattice, masks ready", url, folder, "lattice"),
        ):
            workers[name] = stack.enter_context(Worker(__name__, "remote", *where))
        before = {name: worker.prepare for name, worker in workers.items()}
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats, before=before)
    return {"seconds": {k: statistics.median(v) for k, v in seconds.items()}, "ratios": ratios(seconds, "local fp32")}


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    result = run()
    print("| greedy decode | tokens/s | speed against local fp32 |\n|---|---|---|")
    for name, value in result["seconds"].items():
        print(f"| {name} | {NEW_TOKENS / value:.1f} | {1 / result['ratios'][name]:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        serve_worker(decode_of(local_model()))
    elif sys.argv[1:2] == ["remote"]:
        remote(*sys.argv[2:])
    else:
        main()
