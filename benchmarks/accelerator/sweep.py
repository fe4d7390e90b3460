"""Times the ring product's kernels on a device with other block sizes, each after a check of its numbers.

The block sizes of wire/ring/product_triton.py come from this: `python -m benchmarks.accelerator --parts sweep`. Each
variant is compiled beforehand in a process of its own, several at a time, into Triton's cache (the part `compile`).
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks.accelerator.products import BLOCK

if TYPE_CHECKING:
    from benchmarks.accelerator import Setting

_MANY = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
_FEW = ("BLOCK_N", "BLOCK_K", "SPLITS", "num_warps", "num_stages")
LARGE = [(128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 4, 4), (64, 256, 128, 4, 4)]
SPLIT = [(1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8), (4096, 16)]
FEW = [(128, 128, 8, 4, 3), (128, 256, 4, 8, 3), (64, 256, 4, 4, 3), (64, 128, 4, 4, 4)]
STACKED = [(block_n, block_k, splits, 8, 3) for block_n in (64, 128) for block_k in (64, 128) for splits in (2, 4, 8)]
PROCESSES = 12
Variant = tuple[str, str, tuple[tuple[int, int], ...], int, str, dict[str, int]]
"""A title, a form, the shapes of weights, the number of rows, the table of product_triton that is changed (a form in
`BLOCKS` has its name after a colon), and the change."""


def variants() -> Iterator[Variant]:
    """Yields what is timed."""
    square = ((4096, 4096),)
    for form in ("described", "horner"):
        for sizes in LARGE:
            yield f"4096 rows, {form}", form, square, 4096, f"BLOCKS:{form}", dict(zip(_MANY, sizes, strict=True))
    for block, warps in SPLIT:
        yield "4096 rows, first pass", "described", square, 4096, "SPLIT_BLOCKS", {"BLOCK": block, "num_warps": warps}
    for rows in (1, 8):
        for sizes in FEW:
            yield f"{rows} rows", "described", BLOCK, rows, "FEW_BLOCKS", dict(zip(_FEW, sizes, strict=True))
    for rows in (32, 64):
        for sizes in STACKED:
            yield f"{rows} rows", "described", BLOCK, rows, "STACKED_BLOCKS", dict(zip(_FEW, sizes, strict=True))
    for rows in (128, 512):
        for sizes in LARGE:
            yield (
                f"{rows} rows",
                "described",
                BLOCK,
                rows,
                "BLOCKS only:described",
                dict(zip(_MANY, sizes, strict=True)),
            )


def run(setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds of every variant by shape, and those of bf16."""
    if setting.device == "cpu":
        return {"not measured": "these kernels need a GPU"}
    results: dict[str, Any] = {}
    operands: dict[Any, Any] = {}
    for title, form, shapes, num_rows, table, change in variants():
        key = shapes, num_rows
        if key not in operands:
            operands = {key: [_operands(num_rows, d, m) for d, m in shapes]}
            for rows, weight, _ in operands[key]:
                wide = rows.bfloat16() / 2**31, weight.bfloat16()
                named = results.setdefault(f"{num_rows} rows, bf16", {})
                named[f"{weight.shape[0]}x{weight.shape[1]}"] = device_ms(captured(lambda wide=wide: wide[0] @ wide[1]))
        for rows, weight, exact in operands[key]:
            shape = f"{weight.shape[0]}x{weight.shape[1]}"
            name = f"{title} {tuple(change.values())}"
            results.setdefault(name, {})[shape] = _timed(rows, weight, exact, form, table, change)
    return results


def _timed(rows: Any, weight: Any, exact: Any, form: Any, table: str, change: dict[str, int]) -> Any:
    import torch

    from wire.ring import product_triton

    def work() -> Any:
        return product_triton.product(rows, weight, 32, form)

    try:
        with Changed(table, change):
            if not torch.equal(work()[:8].cpu(), exact):
                return "WRONG NUMBERS"
            return round(device_ms(captured(work)), 5)
    except Exception as exc:  # noqa: BLE001 - such a variant cannot be used on this chip
        return f"{type(exc).__name__}: {str(exc)[:100]}"


class Changed:
    """Changes a table of block sizes of wire/ring/product_triton.py inside its context."""

    def __init__(self, table: str, change: dict[str, int]) -> None:
        from wire.ring import product_triton

        name, _, form = table.partition(":")
        is_only = name.endswith(" only")
        blocks: Any = getattr(product_triton, name.removesuffix(" only"))
        self._blocks, self._change = (blocks[form] if form else blocks), change
        self._small: Any = product_triton.SMALL_BLOCKS if is_only else {}

    def __enter__(self) -> None:
        self._before, self._before_small = dict(self._blocks), dict(self._small)
        self._blocks.update(self._change)
        self._small.clear()

    def __exit__(self, *_: object) -> None:
        self._blocks.clear()
        self._blocks.update(self._before)
        self._small.update(self._before_small)


def compile_all(setting: Setting) -> dict[str, Any]:
    """Compiles all variants; returns how many did not compile."""
    if setting.device == "cpu":
        return {"not measured": "these kernels need a GPU"}
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        failed = pool.map(_compile, [list(variants())[n::PROCESSES] for n in range(PROCESSES)])
        return {"failed": sum(failed)}


def _compile(some: list[Variant]) -> int:
    """Compiles variants into Triton's cache, in a process of its own. Returns how many failed."""
    failed = 0
    for _, form, shapes, num_rows, table, change in some:
        rows, weight, exact = _operands(num_rows, *shapes[0])
        failed += isinstance(_timed(rows, weight, exact, form, table, change), str)
    return failed


def device_ms(work: Callable[[], Any], repeats: int = 20) -> float:
    """Returns the median milliseconds of a function's work on the device, by events, after three runs to warm up."""
    import torch

    for _ in range(3):
        work()
    spans = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that replays what `work` starts on the device, as a graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def _operands(num_rows: int, d: int, m: int) -> tuple[Any, Any, Any]:
    """Returns random rows and weights on the device, and the exact product of the first eight rows."""
    import torch

    from benchmarks.accelerator.products import exact_product

    rows = torch.randint(-(2**31), 2**31, (num_rows, d), device="cuda").to(torch.int32)
    weight = torch.randint(-127, 128, (m, d), device="cuda").to(torch.int8).t()
    return rows, weight, exact_product(rows[:8].cpu(), weight.cpu())
