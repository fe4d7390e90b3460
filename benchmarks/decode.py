"""Measures greedy decoding of one sequence by a provider on this machine, against local decoding in fp32.

Rows are sent without a mask or with the mask `lattice`, whose masks for a run are made before the clock starts. No
masks are made in the background, so that no run uses the processor during another run.

`python -m benchmarks.decode pools` compares `pool="memory"` with `pool="disk"`, on two blocks of Llama-2-7B's shape
with random weights and hints, by a provider in the same process. Masks for the run are made before the clock starts, so
many that none are made during it; with a file, its reader reads ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
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

POOLS = ("memory", "disk", "disk, not in the page cache")
POOL_BYTES = 500_000_000
"""The size of a pool of `pools`: 950 tokens of 526 kB, which are more than the masks of a run and a block of 512."""
ENOUGH_TOKENS = 400
"""The tokens for which masks are ready before a run of `pools`. A pool makes new ones when 256 are left."""


def _decode_of(model: Any, vocabulary: int = 40_000) -> Callable[[], Any]:
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
        serve_worker(_decode_of(client.load_model()), prepare)


def _drop_unnamed_files() -> None:
    """Writes this process's files without a name to the disk, and drops them from the page cache."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).endswith("(deleted)"):
                os.fsync(int(entry.name))
                os.posix_fadvise(int(entry.name), 0, 0, os.POSIX_FADV_DONTNEED)


def _make_wide(folder: Path, num_blocks: int) -> None:
    """Makes a checkpoint of Llama-2-7B's shape with a few blocks and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=256, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=num_blocks,
        num_attention_heads=32, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with no_init_weights():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    few = torch.randn(1 << 20, dtype=torch.float32).mul_(0.02).bfloat16()
    for weight in model.parameters():  # The same million numbers again and again, which is as good and takes no time.
        weight.data.copy_(few.repeat(-(-weight.numel() // len(few)))[: weight.numel()].view_as(weight))
    model.save_pretrained(folder)


class _RandomHints:
    """Serves a model, and answers requests for hints with random numbers: no time of decoding depends on their values,
    and computing them would take minutes."""

    def __init__(self, served: Any) -> None:
        self._served = served
        self._groups = {info.id: info for info in served.manifest().groups}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def compute(self, call: Any, rows: Any, *others: Any) -> Any:
        """Returns the product, or random numbers of a hint's shape."""
        import torch

        from wire.frame import Direction, Purpose

        if call.purpose is not Purpose.HINT:
            return self._served.compute(call, rows, *others)
        info = self._groups[call.group]
        columns = info.out_features if call.direction is Direction.FORWARD else info.in_features
        return torch.randint(-(2**31), 2**31 - 1, (rows.num_rows, columns), dtype=torch.int32)


def _run_pools(repeats: int, names: Sequence[str] = POOLS, num_blocks: int = 2) -> dict[str, Any]:
    """Measures decoding with some of POOLS, memory first, in this process, where the provider computes too. Returns the
    median seconds of each run, and its median ratio to the first run."""
    import tenant_sdk
    from tenant_sdk import embedded
    from wire.transport.inproc import InprocConnection

    tenant_sdk.tune()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _make_wide(folder / "model", num_blocks)
        served = _RandomHints(embedded.served_model(str(folder / "model"), "int8"))
        for weights in (folder / "model").glob("*.safetensors"):
            weights.unlink()  # The provider has its own form of them.
        url = embedded.answer_by(lambda weights: InprocConnection(served))
        runs: dict[str, Callable[[], Any]] = {}
        before: dict[str, Callable[[], Any]] = {}
        for name in names:
            where, _, is_cold = name.partition(", ")
            options = {"pool": where, "pool_bytes": POOL_BYTES, "hints": "stream"}
            client = stack.enter_context(
                tenant_sdk.TenantClient(url, mask="lattice", mask_options=options, cache=folder / "cache")
            )

            def prepare(client: Any = client, is_cold: str = is_cold) -> None:
                client.prepare(ENOUGH_TOKENS)
                if is_cold:
                    _drop_unnamed_files()

            runs[name], before[name] = _decode_of(client.load_model(), 255), prepare
        seconds = interleaved(runs, repeats, before=before)
        embedded.answer_no_more(url)
    return {"seconds": {k: statistics.median(v) for k, v in seconds.items()}, "ratios": ratios(seconds, names[0])}


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
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=POOLS, metavar="NAME", help="memory is the first")
    parser.add_argument("--blocks", type=int, default=2, help="of the model of `pools`")
    parser.add_argument("what", nargs="?", choices=("masks", "pools"), default="masks")
    given = parser.parse_args()
    if given.what == "pools":
        found = _run_pools(given.repeats, given.pools, given.blocks)
        print(f"| greedy decode, blocks of a 7B: {given.blocks} | tokens/s | speed against memory |\n|---|---|---|")
        for name, value in found["seconds"].items():
            print(f"| pool: {name} | {NEW_TOKENS / value:.2f} | {1 / found['ratios'][name]:.3f} |")
        return
    result = run(given.repeats, given.variants)
    print("| greedy decode | tokens/s | speed against local fp32 |\n|---|---|---|")
    for name, value in result["seconds"].items():
        print(f"| {name} | {NEW_TOKENS / value:.1f} | {1 / result['ratios'][name]:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        serve_worker(_decode_of(local_model()))
    elif sys.argv[1:2] == ["remote"]:
        remote(*sys.argv[2:])
    else:
        main()
