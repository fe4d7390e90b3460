"""Measures the memory that a fine-tuning step's activations take at the tenant, against local transformers + PEFT.

Each variant runs in a fresh process. It trains LoRA of rank 16 on all linear layers of SmolLM2-135M in float32, on one
row of tokens, each of which has a label. A short step comes first, so that memory for gradients, AdamW's state and
libraries is already allocated. The result is the peak of resident memory during the next step, minus the resident
memory before this step. malloc's thresholds are fixed in every process, because glibc would otherwise keep a varying
amount of freed pages. Provider and tenant share the machine. A run in int8 `ring` arithmetic without a mask sends rows
of 32-bit numbers, as a masked run does.

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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, interleaved, local_model, provider, ratios, rss_mb, serve_worker

VARIANTS = ("local", "remote", "chunked", "pruned", "replies", "recompute")
"""The variants: `local` is transformers + PEFT, and `remote` uses a provider. The other four also use a provider, and
compute the loss in chunks. In addition, `pruned` keeps fewer tensors for the backward pass. `replies` and `recompute`
compute each block of the model again in the backward pass: `replies` from the provider's replies, which it keeps on
disk, and `recompute` by requesting the products again."""
TIMED = ("chunked", "pruned", "replies")
SHORT = 16
"""The number of tokens of the step before the measurement."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_THRESHOLD_BYTES = 1 << 16


def fix_malloc() -> None:
    """Makes malloc return each block of 64 KiB or more to the system as soon as it is freed."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)


class Stepper:
    """Takes fine-tuning steps of one variant."""

    def __init__(self, variant: str, model: Any, folder: Path) -> None:
        """Adds a LoRA adapter to the model, and turns on the variant's way to save memory."""
        import torch
        from peft import LoraConfig, get_peft_model

        from tenant_sdk.training.checkpointing import Checkpointing
        from tenant_sdk.training.chunked_loss import chunk_loss
        from tenant_sdk.training.reply_store import ReplyStore

        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(0)
        self.model: Any = get_peft_model(model, config).train()
        if variant not in ("local", "remote"):
            chunk_loss(self.model)
        store = ReplyStore(0, folder) if variant == "replies" else None
        mode = variant if variant in ("replies", "recompute") else None
        Checkpointing(mode, store, 0).turn_on(self.model.get_base_model())
        if variant == "pruned":
            from tenant_sdk.training.pruning import prune

            prune(self.model)
        self._optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def step(self, num_tokens: int) -> float:
        """Takes one step and returns its loss."""
        import torch

        ids = torch.randint(100, 40_000, (1, num_tokens), generator=torch.Generator().manual_seed(0))
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())


def _client(url: str, folder: str) -> Any:
    import tenant_sdk

    tenant_sdk.tune()
    return tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder)


def measure_peak(stepper: Stepper, num_tokens: int) -> dict[str, float]:
    """Returns a step's `loss`, and `peak_mb`: by how many MB its peak of resident memory exceeds the memory before."""
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


def peak_process(variant: str, tokens: str, url: str, folder: str) -> None:
    """Measures one variant in this process, and prints the result as JSON."""
    fix_malloc()
    scratch, num_tokens = Path(folder) / "replies", int(tokens)
    if variant == "local":
        found = measure_peak(Stepper(variant, local_model(), scratch), num_tokens)
    else:
        with _client(url, folder) as client:
            stepper = Stepper(variant, client.load_model(), scratch)
            stepper.step(SHORT)
            before = client.traffic
            calls, up, down = before.calls, before.bytes_up, before.bytes_down
            found = measure_peak(stepper, num_tokens)
            after = client.traffic
            found |= {"calls": after.calls - calls, "up": after.bytes_up - up, "down": after.bytes_down - down}
    print(json.dumps(found))


def time_worker(variant: str, tokens: str, url: str, folder: str) -> None:
    """Takes steps of one variant, as a worker."""
    with _client(url, folder) as client:
        stepper = Stepper(variant, client.load_model(), Path(folder) / "replies")
        stepper.step(SHORT)
        serve_worker(lambda: stepper.step(int(tokens)))


def run(
    tokens: int, variants: tuple[str, ...] = VARIANTS, repeats: int = 0, peaks: bool = True
) -> dict[str, dict[str, float]]:
    """Measures variants with rows of one length.

    Args:
        tokens: the number of tokens of the row.
        variants: names of VARIANTS.
        repeats: rounds of timed steps; 0 for no times.
        peaks: whether peaks of memory are measured.

    Returns:
        By variant: `loss` and `peak_mb`. If the variant uses a provider, also `calls`, and `up` and `down` in bytes,
        for the measured step and the short step before it together. If times were measured, also `seconds`, and
        `ratio`, the time divided by that of `chunked`.
    """
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, _ = stack.enter_context(provider(Path(folder)))
        for variant in variants if peaks else ():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.activations", "peak", variant, str(tokens)]
            done = subprocess.run([*command, url, folder], check=True, stdout=subprocess.PIPE, text=True)
            found[variant] = json.loads(done.stdout.splitlines()[-1])
        timed = [variant for variant in TIMED if variant in variants] if repeats else []
        workers = {
            one: stack.enter_context(Worker("benchmarks.activations", "time", one, str(tokens), url, folder))
            for one in timed
        }
        if workers:
            seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats)
            to_plain = ratios(seconds, "chunked")
            for name, each in seconds.items():
                found.setdefault(name, {})
                found[name] |= {"seconds": statistics.median(each), "ratio": to_plain[name]}
    return found


def report(tokens: int, found: dict[str, dict[str, float]]) -> None:
    """Prints the results as a table."""
    local, plain = found.get("local", {}), found.get("remote", {})
    print(f"| 1 × {tokens} | peak, MB | of local | loss | calls | up, MB | traffic of remote | s | × chunked |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        part = one.get("peak_mb", float("nan")) / local.get("peak_mb", float("nan"))
        both = (one.get("up", 0) + one.get("down", 0)) / (plain.get("up", 0) + plain.get("down", 0) or float("nan"))
        memory = f"{one.get('peak_mb', float('nan')):.0f} | {part:.1%} | {one.get('loss', float('nan')):.4f}"
        traffic = f"{one.get('calls', 0):.0f} | {one.get('up', 0) / 1e6:.0f} | {both:.3f}"
        times = f"{one.get('seconds', float('nan')):.1f} | {one.get('ratio', float('nan')):.2f}"
        print(f"| {name} | {memory} | {traffic} | {times} |")


def main() -> None:
    """Measures the variants and lengths that the command line names, and prints a table for each length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds of timed steps; 0 measures memory only")
    parser.add_argument("--times-only", action="store_true", help="measures no memory")
    given = parser.parse_args([] if sys.argv[0].endswith("__main__.py") else None)
    for tokens in given.tokens:
        began = time.monotonic()
        report(tokens, run(tokens, tuple(given.variants), given.repeats, not given.times_only))
        print(f"({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak_process(*sys.argv[2:])
    elif sys.argv[1:2] == ["time"]:
        time_worker(*sys.argv[2:])
    else:
        main()
