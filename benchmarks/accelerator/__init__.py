"""Measures providers and tenants on an accelerator, in parts that each have a time limit and a result of their own.

`python -m benchmarks.accelerator --out DIR` runs these parts, the most valuable first, each in a process of its own.
Each part writes DIR/PART.json as it goes on, so that what was measured stays if the part has to be ended:

- products.py: whether the ring product is exact, and its time against bf16, for a large product and for decode;
- sides.py: a fine-tuning step, prefill, decode and 16 requests, with the tenant on the CPU and on the same device; what
  masks cost; and the shapes of Figures 11, 12 and 19 of the Symbiosis paper;
- replica.py: the provider's replica by rows and tenants, and the share of its time that copies take;
- sweep.py: the ring product's kernels with other block sizes, which the part `compile` compiles beforehand.

Models have the shape of real ones and random weights, so that a machine without a network can make them. Without a CUDA
device nothing is measured. `--device cpu --quick` runs the same code on the CPU with small shapes, which says nothing
about speed. benchmarks/carry.py packs what a bare GPU machine lacks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_POSSIBLE = 2
"""The exit code if there is no CUDA device. It must equal the constant of this name in benchmarks/__main__.py, which
cannot be imported here, since it imports this package."""
LIMITS_S = {"products": 40.0, "models": 300.0, "replica": 30.0, "compile": 60.0, "sweep": 60.0}
"""The parts in their order, each with the seconds after which it is ended. `--limit-s` bounds the whole command."""


@dataclass(frozen=True)
class Setting:
    """Holds what all parts need to know.

    Attributes:
        device: the device's name, such as `cuda:0`.
        is_quick: whether small shapes are used, so that only the code is tried.
        file: where a part writes what it has measured so far; None for nowhere.
        only: the names of the comparisons of `models` to make; empty for all.
    """

    device: str
    is_quick: bool
    file: Path | None = None
    only: tuple[str, ...] = ()

    def note(self, results: dict[str, Any]) -> None:
        """Writes what was measured so far, so that it stays if the part is ended."""
        if self.file is not None:
            self.file.write_text(json.dumps({**_machine(self), "results": results}, indent=1))


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts and exits: with 0 if every part ended and all compared numbers were right, with 1 if not, and with
    NOT_POSSIBLE if there is no CUDA device and `--device cpu` was not given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    parser.add_argument("--device", default="cuda:0", help="cpu runs the code and measures nothing")
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the code")
    parser.add_argument("--out", type=Path, default=Path("accelerator"), help="folder of the results")
    parser.add_argument("--parts", default=",".join(LIMITS_S), help="the parts to run, in this order")
    parser.add_argument("--limit-s", type=float, default=460.0, help="no part goes on after this many seconds")
    parser.add_argument("--only", default="", help="comparisons of the part `models`, separated by semicolons")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args(arguments)
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu --quick runs the code without one", file=sys.stderr)
        sys.exit(NOT_POSSIBLE)
    if given.part:
        sys.exit(run_part(given.part, _setting(given)))
    unknown = set(given.parts.split(",")) - set(LIMITS_S)
    if unknown:
        parser.error(f"expected parts among {', '.join(LIMITS_S)}, got {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    sys.exit(_run_parts(given))


def _setting(given: Any) -> Setting:
    only = tuple(name for name in given.only.split(";") if name)
    return Setting(given.device, given.quick, given.out / f"{given.part}.json", only)


def _run_parts(given: Any) -> int:
    """Runs each part in a process of its own, within its limit and what is left of the whole.

    Returns:
        The command's exit code: 1 if a part failed, was ended or could not begin.
    """
    began, failed = time.monotonic(), 0
    for part in given.parts.split(","):
        left_s = given.limit_s - (time.monotonic() - began)
        limit_s = min(LIMITS_S[part], left_s)
        if limit_s <= 0:
            print(f"{part}: not measured, since the time is up", flush=True)
            failed += 1
            continue
        started = time.monotonic()
        command = [sys.executable, "-W", "ignore", "-m", __name__, "--part", part, "--device", given.device,
                   "--out", str(given.out), "--only", given.only, *(["--quick"] if given.quick else [])]  # fmt: skip
        process = subprocess.Popen(command, start_new_session=False)
        try:
            code = process.wait(timeout=limit_s)
            told = "ended" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code, told = 1, f"ended after its {limit_s:.0f} s; {part}.json has what was measured by then"
        failed += code != 0
        print(f"{part}: {told}, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


def run_part(part: str, setting: Setting) -> int:
    """Runs one part in this process. Returns 1 if a compared number was wrong."""
    import signal

    from benchmarks.accelerator import products, replica, sides, sweep

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of a part are ended with it
    runs: dict[str, Callable[[Setting], dict[str, Any]]] = {
        "products": products.run, "replica": replica.run, "models": sides.run,
        "sweep": sweep.run, "compile": sweep.compile_all,
    }  # fmt: skip
    results = runs[part](setting)
    setting.note(results)
    print(json.dumps(results, indent=1)[:6000], flush=True)
    return 1 if results.get("wrong numbers") else 0


def _machine(setting: Setting) -> dict[str, Any]:
    """Returns what a result must say about where it comes from."""
    import torch

    name = "CPU: no measurement" if setting.device == "cpu" else torch.cuda.get_device_name(setting.device)
    return {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "quick": setting.is_quick}
