"""Checks the exact ring product on a device, and compares its time with a bf16 product of the same shape.

A service without masks would compute the bf16 product. All tensors are on the device before the clock starts, each time
ends with a synchronisation of the device, and the runs take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.common import interleaved, ratios

if TYPE_CHECKING:
    import torch

    from benchmarks.accelerator import Setting

PEER = "bf16"
BARS = {"ring": 2.5, "ring, 24 bits": 2.0, "decode": 1.5}
"""The targets: a ring product may take at most this many times as long as the bf16 product. `ring` and `ring, 24 bits`
are for the large product, and `decode` is for the product `ring` with 1 and 8 rows."""
SIZE, QUICK_SIZE = 4096, 128
BLOCK = ((4096, 12_288), (4096, 4096), (4096, 22_016), (11_008, 4096))
"""The shapes of the layer groups of one block of Llama-2-7B: q, k, v; o; gate, up; down."""
QUICK_BLOCK = ((64, 96), (64, 64))
SAMPLE = 16
"""The number of rows of a large product that are compared with int64 products."""


def run(setting: Setting) -> bool:
    """Prints the results. Returns whether every compared number was right."""
    size = QUICK_SIZE if setting.is_quick else SIZE
    repeats = 2 if setting.is_quick else 20
    wrong, large = 0, _Products(setting.device, [(size, size)], size)
    seconds = interleaved(large.runs(), repeats, warmup=1 if setting.is_quick else 3)
    _print(f"{size} × {size} × {size}", seconds, setting)
    wrong += large.wrong_numbers()
    for num_rows in (1, 8, 64):
        block = _Products(setting.device, QUICK_BLOCK if setting.is_quick else BLOCK, num_rows)
        seconds = interleaved(block.runs(), repeats, warmup=1 if setting.is_quick else 3)
        _print(f"one block of a 7B, {num_rows} rows", seconds, setting)
        wrong += block.wrong_numbers()
    print(f"\nwrong numbers: {wrong}")
    return not wrong


def kernels(device: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns functions for the ring products that a device can compute, by name. The provider uses `ring`; the others
    are for comparison."""
    import torch

    from wire.ring import coding, product_cuda, product_triton

    if device == "cpu":
        return {"ring": coding.product, "ring, limbs as by cuBLAS": product_cuda.product}
    found: dict[str, Callable[[Any, Any], Any]] = {"ring": coding.product}
    if product_triton.is_exact(torch.empty(0, device=device).device):
        found["ring, 24 bits"] = lambda rows, weight: product_triton.product(rows, weight, 24)
        found["ring, limbs by cuBLAS"] = product_cuda.product
    return found


class _Products:
    """Holds random matrices on one device, and computes the products that are measured."""

    def __init__(self, device: str, shapes: Any, num_rows: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._device, self._kernels = torch.device(device), kernels(device)
        self._rows = [
            torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator).to(torch.int32) for d, _ in shapes
        ]
        self._weights = [torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in shapes]
        self._there = [(r.to(self._device), w.to(self._device)) for r, w in zip(self._rows, self._weights, strict=True)]
        wide = [(torch.randn(num_rows, d), torch.randn(d, m)) for d, m in shapes]
        self._wide = [tuple(each.to(self._device, torch.bfloat16) for each in pair) for pair in wide]

    def runs(self) -> dict[str, Callable[[], Any]]:
        """Returns the functions to measure, by name; each computes all products and waits for the device."""

        def ring(kernel: Callable[[Any, Any], Any]) -> Callable[[], Any]:
            return lambda: self._finish([kernel(*each) for each in self._there])

        named = {name: ring(kernel) for name, kernel in self._kernels.items()}
        return {PEER: lambda: self._finish([rows @ weight for rows, weight in self._wide]), **named}

    def _finish(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return found

    def wrong_numbers(self) -> int:
        """Returns how many numbers differ from int64 products mod 2^32 on the CPU, in a sample of rows, for every
        kernel, and for the transposed weight of square shapes too. Of `ring, 24 bits`, only the lowest 24 bits are
        compared."""
        import torch

        wrong = 0
        for rows, weight, (there, weight_there) in zip(self._rows, self._weights, self._there, strict=True):
            at = torch.linspace(0, rows.shape[0] - 1, min(SAMPLE, rows.shape[0])).long()
            for name, kernel in self._kernels.items():
                for turned in (False, True) if weight.shape[0] == weight.shape[1] else (False,):
                    exact = (rows[at].long() @ (weight.t() if turned else weight).long()).to(torch.int32)
                    found = kernel(there, weight_there.t() if turned else weight_there).cpu()[at]
                    dropped = 8 if "24" in name else 0
                    wrong += int(((found << dropped) != (exact << dropped)).sum())
        return wrong


def _print(title: str, seconds: dict[str, list[float]], setting: Setting) -> None:
    print(f"| {title} | ms | ratio to bf16 | bar |\n|---|---|---|---|")
    for name, ratio in ratios(seconds, PEER).items():
        bar = BARS.get(name) if "×" in title else BARS["decode"] if name == "ring" and "64" not in title else None
        met = "" if bar is None or setting.device == "cpu" else f"{bar}: {'met' if ratio <= bar else 'missed'}"
        print(f"| {name} | {statistics.median(seconds[name]) * 1e3:.3f} | {ratio:.2f} | {met} |")
    print(flush=True)
