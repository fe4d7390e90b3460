"""Measures the exact ring product on an accelerator against a bf16 product of the same shape. The two take turns.

In ring arithmetic a provider computes only products rows · W̃ mod 2^32, where W̃ is the int8 weight
(wire/ring/product.py). A service without masks would compute a bf16 product instead. Both directions are measured: one
uses the stored W̃ᵀ, the other a copy of W̃ that is made once and not timed (wire/ring/product_cuda.py). All tensors are
on the device before the clock starts, and each time ends with a synchronisation of the device. A sample of rows is
compared with int64 products. Without a CUDA device nothing is measured. `--device cpu --size 256` runs the same code on
the CPU, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.common import interleaved, ratios

if TYPE_CHECKING:
    import torch

SIZE = 4096
BAR = 2.5
"""The target: the ring product may take at most this many times as long as the bf16 product. Each number is split into
four int8 limbs. Int8 products have twice the rate of bf16 products, so the four products take twice as long as one bf16
product. The remaining half is for splitting and joining."""
SAMPLE = 16
"""The number of rows that are compared with int64 products, including the first and the last row."""
PEER = "bf16 product"
NOT_POSSIBLE = 2
"""The same exit code as in benchmarks/__main__.py, which imports this module."""


class Products:
    """Holds random matrices of one size on one device, and computes the products that are measured."""

    def __init__(self, size: int, device: str) -> None:
        """Makes the matrices.

        Args:
            size: the size of all three dimensions of a product.
            device: the device that computes the products.
        """
        import torch

        generator = torch.Generator().manual_seed(0)
        self._device = torch.device(device)
        self._rows = torch.randint(-(2**31), 2**31, (size, size), generator=generator).to(torch.int32)
        self._weight = torch.randint(-127, 128, (size, size), generator=generator).to(torch.int8)
        self._there = self._rows.to(self._device), self._weight.to(self._device)
        self._wide = [torch.randn(size, size, generator=generator).to(self._device, torch.bfloat16) for _ in range(2)]

    def _ring(self, is_transposed: bool) -> torch.Tensor:
        """Returns the ring product. On the CPU, wire/ring/product_cuda.py computes it too, so that `--device cpu` runs
        the same code."""
        from wire.ring import coding, product_cuda

        rows, weight = self._there
        multiply = product_cuda.product if weight.is_cpu else coding.product
        return multiply(rows, weight.t() if is_transposed else weight)

    def runs(self) -> dict[str, Callable[[], Any]]:
        """Returns the functions to measure, by name; each computes one product and waits for the device."""
        first, second = self._wide
        return {
            PEER: lambda: self._finish(first @ second),
            "ring product, forward": lambda: self._finish(self._ring(False)),
            "ring product, backward": lambda: self._finish(self._ring(True)),
        }

    def _finish(self, found: torch.Tensor) -> torch.Tensor:
        self.synchronise()
        return found

    def synchronise(self) -> None:
        """Waits until the device has finished all work."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def wrong_numbers(self) -> int:
        """Returns how many numbers differ from int64 products on the CPU, in a sample of rows of both directions."""
        import torch

        at = torch.linspace(0, self._rows.shape[0] - 1, min(SAMPLE, self._rows.shape[0])).long()
        wrong = 0
        for is_transposed in (False, True):
            weight = self._weight.t() if is_transposed else self._weight
            exact = (self._rows[at].long() @ weight.long()).to(torch.int32)  # drops the high half
            wrong += int((self._ring(is_transposed).cpu()[at] != exact).sum())
        return wrong

    def is_by_limbs(self) -> bool:
        """Returns whether the device passed the self-test of wire/ring/product_cuda.py; if not, float64 products were
        measured."""
        from wire.ring import product_cuda

        return product_cuda.is_exact(self._there[0].device)


def run(size: int = SIZE, device: str = "cuda", repeats: int = 20) -> dict[str, Any]:
    """Measures the products.

    Returns:
        `seconds`: median seconds, by product; `ratio`: the median ratio to the bf16 product of the same round, by
        product; `wrong`: the count of wrong numbers; `is_by_limbs`: see `Products.is_by_limbs`.
    """
    products = Products(size, device)
    products.synchronise()
    wrong = products.wrong_numbers()
    seconds = interleaved(products.runs(), repeats, warmup=3)
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": ratios(seconds, PEER),
        "wrong": wrong,
        "is_by_limbs": products.is_by_limbs(),
    }


def report(found: dict[str, Any], size: int, device: str, repeats: int) -> None:
    """Prints the results as a table."""
    import torch

    is_gpu = device != "cpu"
    name = torch.cuda.get_device_name(device) if is_gpu else "CPU: no measurement"
    form = "int8 limbs" if found["is_by_limbs"] else "the plain float64 form"
    print(f"{size} × {size} × {size} on {name}, ring by {form}, medians of {repeats} rounds\n")
    print("| run | ms | ratio to bf16 | bar |\n|---|---|---|---|")
    for run_name, ratio in found["ratio"].items():
        bar = "" if run_name == PEER or not is_gpu else f"{BAR}: {'met' if ratio <= BAR else 'missed'}"
        print(f"| {run_name} | {found['seconds'][run_name] * 1e3:.3f} | {ratio:.2f} | {bar} |")
    print(f"\nwrong numbers in the sampled rows: {found['wrong']}")


def main() -> None:
    """Prints the table, or exits with NOT_POSSIBLE if there is no such device."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    parser.add_argument("--device", default="cuda", help="cpu runs the code and measures nothing")
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--repeats", type=int, default=20)
    given, _ = parser.parse_known_args()
    if given.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu --size 256 runs the code without one", file=sys.stderr)
        sys.exit(NOT_POSSIBLE)
    found = run(given.size, given.device, given.repeats)
    report(found, given.size, given.device, given.repeats)
    if found["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
