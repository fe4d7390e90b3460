"""Checks the exact ring product on a device, and compares its time with a bf16 product of the same shape.

A service without masks would compute the bf16 product. All tensors are on the device before the clock starts. On a GPU
both are replayed from a captured graph, as the provider replays products of few rows, and timed by the device's events;
`launched` gives the time when they are launched one by one. Weights of decode are larger than the device's cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def run(setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds of each product and its ratio to bf16, and the number of wrong numbers."""
    size = QUICK_SIZE if setting.is_quick else SIZE
    results: dict[str, Any] = {"wrong numbers": 0}
    cases = [(f"{size}x{size}x{size}", ((size, size),), size)]
    block = QUICK_BLOCK if setting.is_quick else BLOCK
    cases += [(f"one block of a 7B, {rows} rows", block, rows) for rows in (1, 8, 64, 512)]
    for title, shapes, num_rows in cases:
        made = _Products(setting.device, shapes, num_rows)
        results[title] = _compared(made, title, setting)
        results["wrong numbers"] += made.wrong_numbers()
        setting.note(results)
    return results


def _compared(made: _Products, title: str, setting: Setting) -> dict[str, Any]:
    runs, found = made.runs(), {}
    for name, work in runs.items():
        found[name] = {"ms": _ms(work, setting.device)}
        if setting.device != "cpu":
            found[name]["launched ms"] = _launched_ms(work)
    for name, one in found.items():
        one["ratio"] = one["ms"] / found[PEER]["ms"]
        few = name == "ring" and "rows" in title and int(title.split()[-2]) <= 8
        bar = BARS.get(name) if "x" in title else BARS["decode"] if few else None
        if bar is not None and setting.device != "cpu":
            one["bar"] = f"{bar}: {'met' if one['ratio'] <= bar else 'missed'}"
    return found


def _ms(work: Callable[[], Any], device: str) -> float:
    from benchmarks.accelerator.sweep import captured, device_ms

    if device == "cpu":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e3
    return device_ms(captured(work))


def _launched_ms(work: Callable[[], Any]) -> float:
    import torch

    seconds = []
    for _ in range(13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:]) * 1e3


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

        generator = torch.Generator(device).manual_seed(0)
        self._device, self._kernels = torch.device(device), kernels(device)
        self._there = []
        for d, m in shapes:
            rows = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator, device=device).to(torch.int32)
            # As the provider holds it: the inner width is contiguous.
            weight = torch.randint(-127, 128, (m, d), generator=generator, device=device).to(torch.int8).t()
            self._there.append((rows, weight))
        self._wide = [(r.to(torch.bfloat16) / 2**31, w.to(torch.bfloat16)) for r, w in self._there]

    def runs(self) -> dict[str, Callable[[], Any]]:
        """Returns the functions to measure, by name; each starts all products."""

        def ring(kernel: Callable[[Any, Any], Any]) -> Callable[[], Any]:
            return lambda: [kernel(*each) for each in self._there]

        named = {name: ring(kernel) for name, kernel in self._kernels.items()}
        return {PEER: lambda: [rows @ weight for rows, weight in self._wide], **named}

    def wrong_numbers(self) -> int:
        """Returns how many numbers differ from int64 products mod 2^32 on the CPU, in a sample of rows, for every
        kernel, and for the transposed weight of square shapes too. Of `ring, 24 bits`, only the lowest 24 bits are
        compared."""
        import torch

        wrong = 0
        for there, weight_there in self._there:
            rows, weight = there.cpu(), weight_there.cpu()
            at = torch.linspace(0, rows.shape[0] - 1, min(SAMPLE, rows.shape[0])).long()
            for name, kernel in self._kernels.items():
                for turned in (False, True) if weight.shape[0] == weight.shape[1] else (False,):
                    exact = exact_product(rows[at], weight.t() if turned else weight)
                    found = kernel(there, weight_there.t() if turned else weight_there).cpu()[at]
                    dropped = 8 if "24" in name else 0
                    wrong += int(((found << dropped) != (exact << dropped)).sum())
        return wrong


def exact_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the product mod 2^32 by float64 products of 16-bit halves, which are exact and fast: their sums stay
    below 2^53. Rows are int32 and weights int8, on the CPU."""
    import torch

    low, high, wide = (rows & 0xFFFF).double(), (rows >> 16).double(), weight.double()
    return ((low @ wide).long() + ((high @ wide).long() << 16)).to(torch.int32)
