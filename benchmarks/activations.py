"""Measures the memory that a fine-tuning step's activations take at the tenant, against local transformers + PEFT.

Each variant runs in a fresh process: LoRA of rank 16 on all linear layers of SmolLM2-135M in float32, one row of N
tokens with a label on each. A short step comes first, so that gradients, AdamW's state and libraries are there. The
result is the peak of resident memory in the next step, less what was resident before it. malloc's thresholds are fixed
in every process, because glibc would otherwise keep freed pages, and by how much is chance. Provider and tenant share
the machine; int8 `ring` without a mask sends the same 32-bit rows as a masked run.

Times are measured apart, with malloc's defaults: the variants take turns, and the ratio is the median over the rounds.
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
"""What is measured; from `chunked` on, each with the loss in chunks. `replies` are all on disk."""
TIMED = ("chunked", "pruned", "replies")
SHORT = 16
"""The tokens of the step before the measurement."""
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
        """Puts the adapter on the model, and turns on what the variant names."""
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
    """Returns the step's loss, and its peak of resident memory in MB above what was resident before."""
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


def run(tokens: int, variants: tuple[str, ...] = VARIANTS, repeats: int = 0) -> dict[str, dict[str, float]]:
    """Measures variants at one length.

    Args:
        tokens: the number of tokens of the row.
        variants: names of VARIANTS.
        repeats: rounds of timed steps; 0 for no times.

    Returns:
        By variant: `loss`, `peak_mb`, and for remote variants `calls`, `up` and `down` of a short and a measured step;
        `seconds` and `ratio` to `chunked` where times were measured.
    """
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, _ = stack.enter_context(provider(Path(folder)))
        for variant in variants:
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
                found[name] |= {"seconds": statistics.median(each), "ratio": to_plain[name]}
    return found


def report(tokens: int, found: dict[str, dict[str, float]]) -> None:
    """Prints the results as a table."""
    local, plain = found.get("local", {}), found.get("remote", {})
    print(f"| 1 × {tokens} | peak, MB | of local | loss | calls | up, MB | traffic of remote | s | × chunked |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, one in found.items():
        part = one["peak_mb"] / local.get("peak_mb", float("nan"))
        both = (one.get("up", 0) + one.get("down", 0)) / (plain.get("up", 0) + plain.get("down", 0) or float("nan"))
        print(
            f"| {name} | {one['peak_mb']:.0f} | {part:.1%} | {one['loss']:.4f} | {one.get('calls', 0):.0f} "
            f"| {one.get('up', 0) / 1e6:.0f} | {both:.3f} | {one.get('seconds', float('nan')):.1f} "
            f"| {one.get('ratio', float('nan')):.2f} |"
        )


def main() -> None:
    """Measures and prints what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds of timed steps; 0 measures memory only")
    given = parser.parse_args([] if sys.argv[0].endswith("__main__.py") else None)
    for tokens in given.tokens:
        began = time.monotonic()
        report(tokens, run(tokens, tuple(given.variants), given.repeats))
        print(f"({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        peak_process(*sys.argv[2:])
    elif sys.argv[1:2] == ["time"]:
        time_worker(*sys.argv[2:])
    else:
        main()
