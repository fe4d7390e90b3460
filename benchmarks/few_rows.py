"""Measures the exact product mod 2^32 of a few rows against that of one row, over all layers of SmolLM2-135M.

If several sequences are decoded together, their rows reach the provider as batches of 2 to 32 rows. One pass multiplies
the rows with every weight of the model once, in the model's order. As in the provider, `wire.ring.kernels.OneRow`
multiplies one row, and `wire.ring.kernels.products` multiplies several rows. Weights are random int8 numbers. Passes go
through several copies of the model, which together are larger than two last-level caches (if `MOST_COPIES` suffice), so
that each weight comes from memory. Row counts take turns. Each pass is compared with the pass with one row in the same
turn, and a ratio is the median over the turns. Other work on the machine lengthens the elapsed time but not the
processor time, so both are printed.

`VEILBASE_KERNELS=avx2` measures the kernels that a processor without VNNI uses. (On a processor with VNNI, this setting
makes the provider use `torch._int_mm` for more than one row.) `VEILBASE_KERNELS=none` measures
`wire.ring.coding.product`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.masks import GROUPS, NUM_LAYERS

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
BARS = {"avx2": 4.5, "vnni": 2.5}
"""The targets, by the kernels that are in use: `BAR_ROWS` rows may take at most this many times as long as one row."""
BAR_ROWS = 16
MOST_COPIES = 12
"""The most copies of the model's 106 MB of weights that are made, however large the last-level cache is."""

Seconds = dict[int, list[tuple[float, float]]]
"""Maps a number of rows to (elapsed seconds, processor seconds) of each pass with this number of rows."""


class _Passes:
    """Computes the products of all layers, in order. Each pass uses the next copy of the model."""

    def __init__(self, num_copies: int, is_backward: bool, rows: tuple[int, ...]) -> None:
        """Makes the weights.

        Args:
            num_copies: the number of copies of the model's weights.
            is_backward: whether the weights are read transposed, as for gradients.
            rows: the numbers of rows that passes may have.
        """
        import torch

        copies = [[_weight(shape, is_backward) for shape in [*GROUPS.values()] * NUM_LAYERS] for _ in range(num_copies)]
        self._copies: Iterator[list[Any]] = itertools.cycle(copies)
        self._one_row = {id(weight): _one_row(weight) for copy in copies for weight in copy}
        self._rows = {
            (num_rows, width): torch.randint(-(2**31), 2**31, (num_rows, width), dtype=torch.int32)
            for num_rows in rows
            for widths in GROUPS.values()
            for width in widths
        }

    def multiply(self, num_rows: int) -> None:
        """Multiplies `num_rows` rows by each weight of the next copy, and drops the products."""
        import torch

        from wire.ring import coding, kernels
        from wire.ring.buffers import unwritten_tensor

        for weight in next(self._copies):
            rows, by_bytes = self._rows[num_rows, weight.shape[0]], self._one_row[id(weight)]
            if by_bytes is None:
                coding.product(rows, weight)
            elif num_rows == 1:
                by_bytes(memoryview(rows.numpy()).cast("B"), memoryview(bytearray(4 * weight.shape[1])))
            else:
                kernels.products([rows], weight, [unwritten_tensor(num_rows, weight.shape[1], torch.int32)])


def _weight(shape: tuple[int, int], is_backward: bool) -> Any:
    import torch

    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    return weight.t() if is_backward else weight


def _one_row(weight: Any) -> Callable[[memoryview, memoryview], None] | None:
    from wire.ring import kernels

    return kernels.OneRow(weight).multiply if kernels.available() else None


def form() -> str:
    """Returns which kernels are in use: "vnni", "avx2" or "none"."""
    from wire.ring import kernels

    if not kernels.available():
        return "none"
    return "vnni" if kernels.has_vnni() else "avx2"


def _copies_beyond_cache() -> int:
    """Returns the smallest number of copies of the model that do not fit into two last-level caches, but at most
    `MOST_COPIES`."""
    model_bytes = NUM_LAYERS * sum(d * m for d, m in GROUPS.values())
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    largest = max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=0)
    return min(MOST_COPIES, 1 + 2 * largest // model_bytes)


def _measure(passes: _Passes, rows: tuple[int, ...], num_threads: int, repeats: int) -> Seconds:
    """Returns the seconds of `repeats` passes for each number of rows. The row counts take turns, after one turn that
    is not counted."""
    import torch

    torch.set_num_threads(num_threads)
    found: Seconds = {num_rows: [] for num_rows in rows}
    for repeat in range(1 + repeats):
        for num_rows in rows:
            wall, processor = time.perf_counter(), time.process_time()
            passes.multiply(num_rows)
            if repeat:
                found[num_rows].append((time.perf_counter() - wall, time.process_time() - processor))
    return found


def report(seconds: Seconds) -> None:
    """Prints one table. If there is a target for the kernels in use and `BAR_ROWS` rows were measured, prints the ratio
    for `BAR_ROWS` rows beside the target."""
    print("| rows | ms | × one row | processor ms | × one row |\n|---|---|---|---|---|")
    ratios = {num_rows: [_ratio(seconds, num_rows, clock) for clock in range(2)] for num_rows in seconds}
    for num_rows, pairs in seconds.items():
        wall, processor = (statistics.median(pair[clock] for pair in pairs) * 1e3 for clock in range(2))
        by_wall, by_processor = ratios[num_rows]
        print(f"| {num_rows} | {wall:.1f} | {by_wall:.2f} | {processor:.1f} | {by_processor:.2f} |")
    bar = BARS.get(form())
    if bar is not None and BAR_ROWS in ratios:
        by_wall, by_processor = ratios[BAR_ROWS]
        print(f"\n{BAR_ROWS} rows: {by_wall:.2f} times one row, {by_processor:.2f} by the processor; bar {bar}")


def _ratio(seconds: Seconds, num_rows: int, clock: int) -> float:
    """Returns the median, over the turns, of the time of a pass divided by that of the pass with one row. `clock` is 0
    for elapsed time and 1 for processor time."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(seconds[num_rows], seconds[1], strict=True))


def main() -> None:
    """Prints a table for each direction and number of threads."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_rows")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--copies", type=int, default=_copies_beyond_cache(), help="of the model's weights")
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    given, _ = parser.parse_known_args()
    rows = tuple(dict.fromkeys([1, *given.rows]))
    print(f"kernels: {form()}; {given.copies} copies of the weights, medians of {given.repeats}")
    for direction in given.directions:
        passes = _Passes(given.copies, direction == "backward", rows)
        for num_threads in given.threads:
            print(f"\n{direction}, {num_threads} thread{'s' if num_threads > 1 else ''}\n")
            report(_measure(passes, rows, num_threads, given.repeats))


if __name__ == "__main__":
    main()
