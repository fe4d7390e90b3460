"""Measures greedy decoding of one sequence by a provider on this machine, against local decoding in fp32.

Rows are sent without a mask or with the mask `lattice`, whose masks for a run are made before the clock starts. No
masks are made in the background, so that no run uses the processor during another run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Providers, Worker, interleaved, local_model, ratios, serve_worker

PROMPT_TOKENS, NEW_TOKENS = 32, 24
VARIANTS = {
    # name: (carrier, mask)
    "int8 ring, off": ("", "off"),
    "int8 ring, off, by gRPC": ("gRPC", "off"),
    "int8 ring, off, by ipc": ("ipc", "off"),
    "lattice, masks ready": ("", "lattice"),
    "lattice, masks ready, by ipc": ("ipc", "lattice"),
}


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


def run(repeats: int = 9, names: Sequence[str] = tuple(VARIANTS)) -> dict[str, Any]:
    """Measures the variants and the local peer. Returns the median seconds of each run, and its median ratio to the
    local fp32 run."""
    with ExitStack() as stack:
        workers = {"local fp32": stack.enter_context(Worker(__name__, "local"))}
        providers = Providers(stack)
        for name in names:
            carrier, mask = VARIANTS[name]
            where = providers.of(carrier)
            workers[name] = stack.enter_context(Worker(__name__, "remote", where.url, where.folder, mask))
        before = {name: worker.prepare for name, worker in workers.items()}
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats, before=before)
    return {"seconds": {k: statistics.median(v) for k, v in seconds.items()}, "ratios": ratios(seconds, "local fp32")}


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    given = parser.parse_args()
    result = run(given.repeats, given.variants)
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
