"""Measures the memory and traffic of one LoRA step in windows of tokens, beside local transformers + PEFT.

Each side takes one step, on one row of TOKENS tokens, in a fresh process, after a step on 64 tokens. The figure for
memory is the peak of the process's resident memory during the step, less the resident memory before it, so weights,
adapters and libraries do not count. malloc returns freed blocks of 64 KiB and more to the system at once, since
otherwise the figure would depend on what malloc keeps. The provider is a separate process, over mTLS loopback. There is
no mask, since the masks of `lattice` are in a pool whose size does not depend on the step. An example of the command is
`python -m benchmarks.windows --tokens 4096 --sides local 256`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.common import local_model, provider

SIDES = ("local", "remote", "512", "256")
"""The sides that are measured by default. `local` is transformers + PEFT, and `remote` uses a provider; both compute
the whole row at once. A number is a remote side that computes the row in windows of this number of tokens. With an `r`
after the number, the provider's replies in a window's first forward pass are kept on disk for its second one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Numbers of the parameters of `mallopt`, from glibc's malloc.h."""
_MAPPED_BYTES = 1 << 16
_WARM_TOKENS = 64


def _fix_malloc() -> None:
    """Makes malloc return each block of 64 KiB or more to the system as soon as it is freed, and use one heap."""
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((_M_MMAP_THRESHOLD, _MAPPED_BYTES), (_M_TRIM_THRESHOLD, _MAPPED_BYTES), (_M_ARENA_MAX, 1)):
        mallopt(parameter, value)


def _memory_mb(name: str) -> float:
    """Returns a number of /proc/self/status, in units of 1000 KiB: VmRSS for the resident memory, VmHWM for its peak.
    Returns NaN if there is no line with this name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    return float("nan")


def _take_step(model: Any, num_tokens: int, window_tokens: int | None, replies: Any = None) -> float:
    """Computes the gradients of one row of random tokens and returns the loss.

    Args:
        model: a model with an adapter.
        num_tokens: the number of tokens of the row.
        window_tokens: the number of tokens of a window; None for the whole row.
        replies: the `ReplyStore` that keeps the provider's replies in a window's first pass; None if the same products
            are requested again later.
    """
    import torch

    from tenant_sdk.model.run_state import run_states
    from tenant_sdk.training.activation_checkpointing import KeptReplies
    from tenant_sdk.training.windows import Windows

    ids = torch.randint(100, 40_000, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    if window_tokens is not None:
        windows = Windows(model, window_tokens)
        if replies is not None:
            windows.contexts = KeptReplies(replies, run_states(model)).contexts
        return float(windows.backward(inputs))
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


def measure(
    model: Any, num_tokens: int, window_tokens: int | None, client: Any = None, replies: Any = None
) -> dict[str, float]:
    """Gives a model a LoRA adapter, takes a step on `_WARM_TOKENS` tokens and then the step that is measured. Returns
    the figures of this step: `MB` of memory, `seconds`, `loss` and, if there is a client, `up` and `down`, the traffic
    in MB per token."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, config).train()
    _take_step(model, _WARM_TOKENS, window_tokens, replies)
    resident, before = _memory_mb("VmRSS"), client.traffic if client is not None else None
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    began = time.monotonic()
    loss = _take_step(model, num_tokens, window_tokens, replies)
    found = {"seconds": time.monotonic() - began, "MB": _memory_mb("VmHWM") - resident, "loss": loss}
    if before is not None:
        found["up"] = (client.traffic.bytes_up - before.bytes_up) / num_tokens / 1e6
        found["down"] = (client.traffic.bytes_down - before.bytes_down) / num_tokens / 1e6
    return found


def _run_side(side: str, num_tokens: int, folder: str, url: str) -> None:
    """Takes one side's step in this process, and prints the figures of `measure` as JSON."""
    _fix_malloc()
    if side == "local":
        print(json.dumps(measure(local_model(), num_tokens, None)))
        return
    import tenant_sdk

    tenant_sdk.tune()
    from tenant_sdk.training.activation_checkpointing import ReplyStore

    with tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder) as client:
        window_tokens = None if side == "remote" else int(side.removesuffix("r"))
        replies = ReplyStore(0, Path(folder)) if side.endswith("r") else None
        print(json.dumps(measure(client.load_model(), num_tokens, window_tokens, client, replies)))


def run(num_tokens: int, sides: list[str]) -> dict[str, dict[str, float]]:
    """Runs each side in a fresh process, and returns the figures of `measure` by side."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, provider(Path(folder)) as (url, _):
        for side in sides:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.windows", "--side", side, folder, url]
            command += ["--tokens", str(num_tokens)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
            found[side] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.windows")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        _run_side(given.side[0], given.tokens, *given.side[1:])
        return
    print(f"| 1 × {given.tokens} | MB | of local | s | MB a token up | down | loss |\n|---|--:|--:|--:|--:|--:|--:|")
    found = run(given.tokens, given.sides)
    for side, one in found.items():
        share = f"{one['MB'] / found['local']['MB']:.1%}" if "local" in found else ""
        traffic = [f"{one[way]:.2f}" if way in one else "" for way in ("up", "down")]
        print(
            f"| {side} | {one['MB']:.0f} | {share} | {one['seconds']:.1f} | {' | '.join(traffic)} | {one['loss']:.4f} |"
        )


if __name__ == "__main__":
    main()
