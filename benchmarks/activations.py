"""Measures the memory that a fine-tuning step's activations take at the tenant, against local transformers + PEFT.

Each variant runs in a fresh process. It trains an adapter of SmolLM2-135M in float32 on one row of tokens, each of
which has a label: by default LoRA of rank 16 on all linear layers. A short step comes first, so that memory for
gradients, AdamW's state and libraries is already allocated. The result is the peak of resident memory during the next
step, minus the resident memory before this step. malloc's thresholds are fixed in every process, because glibc would
otherwise keep a varying amount of freed pages. With `--malloc default` they are not, as in a user's own program, and
`replies`, `recompute` and `windows` set them during a step, as `finetune` does. Provider and tenant share the machine.
A run in int8 `ring` arithmetic without a mask sends rows of 32-bit numbers, as a masked run does.

With `--results FILE` the peaks are added to a file, so that a long measurement can be made in pieces;
`python -m benchmarks.activation_figures FILE` makes tables and plots from it.

Times are measured in separate runs, with malloc's defaults: the variants take turns, and the ratio is the median over
the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, interleaved, local_model, provider, ratios, rss_mb, serve_worker

VARIANTS = ("local", "remote", "chunked", "pruned", "replies", "recompute", "windows")
"""The variants: `local` is transformers + PEFT, and `remote` uses a provider. The others also use a provider, and
compute the loss in chunks. In addition, `pruned` keeps fewer tensors for the backward pass. `replies` and `recompute`
compute each block of the model again in the backward pass: `replies` from the provider's replies, which it keeps on
disk, and `recompute` by requesting the products again. `windows` computes the row in windows of 256 tokens, and keeps
the replies on disk."""
TIMED = ("chunked", "pruned", "replies")
WINDOW_TOKENS = 256
METHODS = ("lora", "ia3", "prefix")
"""The adapters: LoRA of rank 16 on all linear layers; IA3 on k, v and down, as in its paper; 32 tokens of prefix
tuning. PEFT has no bottleneck adapter (an additional layer of a small width inside a block)."""
MALLOC = ("fixed", "default")
"""What malloc's thresholds are in the measured process: fixed from its start, or left to glibc."""
SHORT = 16
"""The number of tokens of the step before the measurement."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_THRESHOLD_BYTES = 1 << 16


def fix_malloc() -> None:
    """Makes malloc return each block of 64 KiB or more to the system as soon as it is freed."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)


def adapter_config(method: str) -> Any:
    """Returns PEFT's config of one of METHODS."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig

    if method == "ia3":
        targets = ["k_proj", "v_proj", "down_proj"]
        return IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    if method == "prefix":
        return PrefixTuningConfig(num_virtual_tokens=32, task_type="CAUSAL_LM")
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class Stepper:
    """Takes fine-tuning steps of one variant."""

    def __init__(self, variant: str, model: Any, folder: Path, method: str = "lora") -> None:
        """Adds an adapter to the model, and turns on the variant's way to save memory."""
        import torch
        from peft import get_peft_model

        torch.manual_seed(0)
        self.model: Any = get_peft_model(model, adapter_config(method)).train()
        self._takes_no_cache = {} if method == "prefix" else {"use_cache": False}
        self._kept = self._windows = None
        if variant not in ("local", "remote"):
            self._save_memory(variant, folder, method)
        self._optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def _save_memory(self, variant: str, folder: Path, method: str) -> None:
        from tenant_sdk.training.activation_checkpointing import Checkpointing, choose
        from tenant_sdk.training.finetune import prepare_windows
        from tenant_sdk.training.loss import chunk_loss
        from tenant_sdk.training.pruning import prune

        chunk_loss(self.model, every_position=method == "prefix")
        if variant == "pruned":
            prune(self.model)
        mode = {"windows": "replies"}.get(variant, variant if variant in ("replies", "recompute") else None)
        base, budget_mb = self.model.get_base_model(), 0 if mode == "replies" else None
        self._kept: Checkpointing | None = choose(mode, base, SHORT, False, budget_mb, folder)
        self._windows = prepare_windows(self.model, WINDOW_TOKENS if variant == "windows" else None, self._kept)

    def step(self, num_tokens: int) -> float:
        """Takes one step and returns its loss."""
        import torch

        ids = torch.randint(100, 40_000, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        if self._kept is not None:
            self._kept.before_step(num_tokens)
        if self._windows is not None:
            loss = self._windows.backward({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        else:
            loss = self.model(input_ids=ids, labels=ids, **self._takes_no_cache).loss
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())


def _client(url: str, folder: str) -> Any:
    import tenant_sdk

    tenant_sdk.tune()
    return tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder)


def measure_peak(stepper: Stepper, num_tokens: int) -> dict[str, float]:
    """Takes a short step and then the step that is measured. Returns this step's `loss`, and `peak_mb`: by how many MB
    its peak of resident memory exceeds the memory before it."""
    stepper.step(SHORT)
    before = rss_mb_now()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident
    loss = stepper.step(num_tokens)
    return {"loss": loss, "peak_mb": _status("VmHWM") - before}


def rss_mb_now() -> float:
    """Returns the resident memory of this process in MB, after freed pages have been given back."""
    import gc
    import os

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_mb(os.getpid())


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    return float("nan")


def peak_process(method: str, variant: str, tokens: str, malloc: str, url: str, folder: str) -> None:
    """Measures one variant in this process, and prints the result as JSON."""
    if malloc == "fixed":
        fix_malloc()
    scratch, num_tokens = Path(folder) / "replies", int(tokens)
    if variant == "local":
        found = measure_peak(Stepper(variant, local_model(), scratch, method), num_tokens)
    else:
        with _client(url, folder) as client:
            stepper = Stepper(variant, client.load_model(), scratch, method)
            stepper.step(SHORT)
            before = client.traffic
            calls, up, down = before.calls, before.bytes_up, before.bytes_down
            found = measure_peak(stepper, num_tokens)
            after = client.traffic
            found |= {"calls": after.calls - calls, "up": after.bytes_up - up, "down": after.bytes_down - down}
    print(json.dumps(found))


def time_worker(variant: str, tokens: str, url: str, folder: str) -> None:
    """Takes steps of one variant with LoRA, as a `Worker` process."""
    with _client(url, folder) as client:
        stepper = Stepper(variant, client.load_model(), Path(folder) / "replies")
        stepper.step(SHORT)
        serve_worker(lambda: stepper.step(int(tokens)))


def peaks(
    method: str, tokens: int, variants: Sequence[str], url: str, folder: str, limit_s: float, malloc: str = "fixed"
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures variants, each in a fresh process.

    Args:
        method: one of METHODS.
        tokens: the number of tokens of the row.
        variants: names of VARIANTS.
        url, folder: the provider's URL, and the folder of the tenant's identity.
        limit_s: the seconds after which a process is ended; then there is no result.
        malloc: one of MALLOC.

    Yields:
        (the variant, its figures): `loss` and `peak_mb` of the measured step. If the variant uses a provider, there are
        also `calls`, and `up` and `down` in bytes, of the measured step and the short step before it together.
    """
    for variant in variants:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.activations", "peak", method, variant]
        try:
            done = subprocess.run(
                [*command, str(tokens), malloc, url, folder],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            continue
        yield variant, json.loads(done.stdout.splitlines()[-1])


def times(tokens: int, variants: Sequence[str], url: str, folder: str, repeats: int) -> dict[str, dict[str, float]]:
    """Returns, for each of those `variants` that are in TIMED, the median `seconds` of a step with LoRA, and `ratio`,
    the median of its time divided by that of `chunked`, if that is among them."""
    with ExitStack() as stack:
        workers = {
            one: stack.enter_context(Worker("benchmarks.activations", "time", one, str(tokens), url, folder))
            for one in TIMED
            if one in variants
        }
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats)
    found = {name: {"seconds": statistics.median(each)} for name, each in seconds.items()}
    for name, ratio in (ratios(seconds, "chunked") if "chunked" in seconds else {}).items():
        found[name]["ratio"] = ratio
    return found


def add_result(file: Path, method: str, tokens: int, variant: str, found: dict[str, float]) -> None:
    """Adds a result to a JSON file; it replaces an earlier result of the same method, number of tokens and variant."""
    results = json.loads(file.read_text()) if file.exists() else {}
    results.setdefault(method, {}).setdefault(str(tokens), {})[variant] = found
    file.write_text(json.dumps(results, indent=1))


def report(method: str, tokens: int, found: dict[str, dict[str, float]]) -> None:
    """Prints the results as a table."""
    local, plain = found.get("local", {}), found.get("remote", {})
    print(
        f"| {method}, 1 × {tokens} | peak, MB | of local | loss | calls | up, MB | traffic of remote | s | × chunked |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        part = one.get("peak_mb", float("nan")) / local.get("peak_mb", float("nan"))
        both = (one.get("up", 0) + one.get("down", 0)) / (plain.get("up", 0) + plain.get("down", 0) or float("nan"))
        memory = f"{one.get('peak_mb', float('nan')):.0f} | {part:.1%} | {one.get('loss', float('nan')):.4f}"
        traffic = f"{one.get('calls', 0):.0f} | {one.get('up', 0) / 1e6:.0f} | {both:.3f}"
        times = f"{one.get('seconds', float('nan')):.1f} | {one.get('ratio', float('nan')):.2f}"
        print(f"| {name} | {memory} | {traffic} | {times} |")


def main() -> None:
    """Measures what the command line names, and prints a table for each adapter and length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["lora"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--malloc", choices=MALLOC, default="fixed", help="default is what a user's own program has")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of timed steps (LoRA); 0 measures memory only")
    parser.add_argument("--times-only", action="store_true", help="measures no memory")
    parser.add_argument("--limit-s", type=float, default=900, help="the time after which a process is given up")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="a file to which peaks are added")
    given = parser.parse_args([] if sys.argv[0].endswith("__main__.py") else None)
    with tempfile.TemporaryDirectory() as folder, provider(Path(folder)) as (url, _):
        for method in given.methods:
            for tokens in given.tokens:
                began, found = time.monotonic(), dict[str, dict[str, float]]()
                variants = [] if given.times_only else given.variants
                for variant, one in peaks(method, tokens, variants, url, folder, given.limit_s, given.malloc):
                    found[variant] = one
                    if given.results is not None:
                        add_result(given.results, method, tokens, variant, one)
                if given.repeats and method == "lora":
                    for variant, one in times(tokens, given.variants, url, folder, given.repeats).items():
                        found.setdefault(variant, {}).update(one)
                report(method, tokens, found)
                print(f"({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak_process(*sys.argv[2:])
    elif sys.argv[1:2] == ["time"]:
        time_worker(*sys.argv[2:])
    else:
        main()
