"""Measures providers and tenants on an accelerator in one command of under eight minutes.

`python -m benchmarks.accelerator` runs four parts, one after another, and prints a table for each:

- products.py: whether the ring product is exact, and its time against bf16, for a large product and for decode;
- replica.py: the provider's replica by rows and tenants, and the share of its time that copies take;
- model.py: a fine-tuning step and decode, tenant and provider on the device, against local models on it;
- model.py: step time and device memory by the number of adapters that are trained at once.

Models have the shape of real ones and random weights, so that a machine without a network can make them. Without a CUDA
device nothing is measured. `--device cpu --quick` runs the same code on the CPU with small shapes, which says nothing
about speed. benchmarks/carry.py packs what a bare GPU machine lacks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BUDGET_S = 460.0
"""The seconds after which no further part begins. With the last part's own time, the command takes under eight
minutes."""
NOT_POSSIBLE = 2
"""The exit code if there is no CUDA device. It must equal the constant of this name in benchmarks/__main__.py, which
cannot be imported here, since it imports this package."""


@dataclass(frozen=True)
class Setting:
    """Holds what all parts need to know.

    Attributes:
        device: the device's name, such as `cuda:0`.
        is_quick: whether small shapes are used, so that only the code is tried.
        began_s: the time at which the command began, by time.monotonic.
    """

    device: str
    is_quick: bool
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Returns the seconds that are left of `BUDGET_S`; negative once the budget is used up."""
        return BUDGET_S - (time.monotonic() - self.began_s)


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts and exits: with 0 if all compared numbers were right, with 1 if one was wrong, and with
    NOT_POSSIBLE if there is no CUDA device and `--device cpu` was not given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    parser.add_argument("--device", default="cuda:0", help="cpu runs the code and measures nothing")
    parser.add_argument("--quick", action="store_true", help="small shapes, to try the code")
    given, _ = parser.parse_known_args(arguments)
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu --quick runs the code without one", file=sys.stderr)
        sys.exit(NOT_POSSIBLE)
    setting = Setting(given.device, given.quick)
    name = torch.cuda.get_device_name(given.device) if given.device != "cpu" else "CPU: no measurement"
    print(f"device: {name}; torch {torch.__version__}; {time.strftime('%Y-%m-%d')}", flush=True)
    sys.exit(run_parts(setting))


def run_parts(setting: Setting) -> int:
    """Runs the parts that the budget allows. Returns the command's exit code: 1 if a number was wrong."""
    from benchmarks.accelerator import model, products, replica

    parts: tuple[tuple[str, float, Callable[[Setting], bool]], ...] = (
        ("The ring product", 20, products.run),
        ("The provider's replica", 20, replica.run),
        ("Fine-tuning step and decode", 120, model.compare),
        ("Adapters that are trained at once", 120, model.by_adapters),
    )
    is_right = True
    for title, needed_s, run in parts:
        print(f"\n### {title}\n", flush=True)
        if setting.left_s < needed_s:
            print(f"not measured: {setting.left_s:.0f} s are left, and it takes about {needed_s:.0f}")
            continue
        is_right &= run(setting)
    print(f"\nwhole command: {time.monotonic() - setting.began_s:.0f} s")
    return 0 if is_right else 1
