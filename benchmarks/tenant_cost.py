"""Measures what a mask of a d → d linear layer costs the tenant, against a local computation of the layer, per token.

Our side makes the secrets, errors, mask and effect (what unmasking subtracts) of a forward pass with the default
parameters. Hints, which are the products of the public matrix A and the weights, are read in the form in which they are
stored on disk: numbers of 24 bits, memory-mapped. Their tiles are checked before the clock starts. The transforms of A
are kept, since one A serves all layers. Encoding, unmasking and transport are not included. The peers compute the same
layer on this machine in float32, bfloat16 and int8 (rows quantised one by one, `torch._int_mm`, multiplied by the
scales), in blocks of 512 tokens. Hints and weights are random: no time here depends on their values. For a wide layer
only `--columns` outputs are computed, and the time is scaled up to all outputs. The table marks such layers. All runs
of one width take turns, and a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import interleaved, pyplot, ratios

SIZES = (576, 1024, 2048, 4096, 8192, 16384)
TOKENS = 512
COLUMNS = 4096
"""The most outputs of a local layer that are computed. For 16,384 inputs they need 268 MB of float32 weights."""
BLOCKS = 8
"""The number of blocks of masks that share transforms, as in a pool. A caller that finds no mask ready waits for one
block, which the table shows as `1 block`."""
OURS, ONE_BLOCK, PEERS = "masks", "masks, 1 block", ("fp32", "bf16", "int8")


class Making:
    """Makes masks and effects of one layer."""

    def __init__(self, size: int, folder: Path, parameters: Any) -> None:
        """Makes the public matrix and a random hint.

        Args:
            size: d, the number of inputs and of outputs.
            folder: the folder in which the hint is stored.
            parameters: the parameters of the lattice mask.
        """
        import torch

        from noise.hints.store import HintKey, HintStore
        from noise.polynomial.negacyclic import transform
        from noise.sampling import Csprng
        from wire.frame import Direction

        self._size, self._parameters, self._rng = size, parameters, Csprng()
        rows = parameters.dimension
        self._public = transform(torch.randint(-(2**31), 2**31 - 1, (rows, size), dtype=torch.int32), parameters)

        class Reply:
            """Stands in for a provider's reply: returns random rows in place of a part of a hint."""

            def __init__(self, count: int) -> None:
                self.count = count

            def result(self) -> torch.Tensor:
                return torch.randint(-(2**31), 2**31 - 1, (self.count, size), dtype=torch.int32)

        self._store = HintStore(folder)
        key = HintKey("0" * 64, bytes(32), size, Direction.FORWARD)
        self._hint = self._store.get(key, (rows, size), lambda first, count: Reply(count))
        self._hint.load(0, size)  # checks every tile, as a session does once

    @property
    def hint_bytes(self) -> int:
        """Returns the bytes of the hint on disk, for one direction."""
        return self._store.total_bytes([(self._parameters.dimension, self._size)])

    def make(self, num_blocks: int) -> None:
        """Makes masks of the inputs and their effects on the outputs, in `num_blocks` blocks of 512 rows."""
        from noise import sampling
        from noise.polynomial import negacyclic

        degree, rank = self._parameters.ring_degree, self._parameters.rank
        secrets_hat = negacyclic.secret_transform(sampling.ternary(self._rng, (num_blocks, rank, degree)))
        negacyclic.masks_and_effects(
            self._public,
            secrets_hat,
            self._hint,
            lambda shape: sampling.error(self._rng, shape, self._parameters),
            self._parameters,
            packs_effects=True,
        )


def _local_layer(size: int, columns: int) -> dict[str, Callable[[], Any]]:
    """Returns functions that compute the first `columns` outputs of the layer for TOKENS rows, by arithmetic."""
    import torch

    rows, weight = torch.randn(TOKENS, size), torch.randn(size, columns)
    alpha = weight.abs().amax(dim=0) / 127
    narrow = (weight / alpha).round_().to(torch.int8)
    narrow_rows = rows.mul(30).round_().clamp_(-127, 127).to(torch.int8)
    rows_bf16, weight_bf16 = rows.to(torch.bfloat16), weight.to(torch.bfloat16)

    def int8() -> torch.Tensor:
        # only `columns` inputs of each row are quantised, so that this time may be scaled up, too
        part = rows[:, :columns]
        scale = part.abs().amax(dim=1, keepdim=True) / 127
        quantised = (part / scale).round_().to(torch.int8)
        product = torch._int_mm(quantised if columns == size else narrow_rows, narrow)
        return product.to(torch.float32).mul_(scale).mul_(alpha)

    def in_inference(product: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def run() -> None:
            with torch.inference_mode():
                product()

        return run

    products = {"fp32": lambda: rows @ weight, "bf16": lambda: rows_bf16 @ weight_bf16, "int8": int8}
    return {name: in_inference(product) for name, product in products.items()}


@dataclass(frozen=True)
class _Found:
    """Holds the results for one width.

    Attributes:
        size: d, the number of inputs and of outputs.
        columns: the number of outputs that the local layers computed.
        us: microseconds per token, by run.
        ratio: the time of making masks divided by the peer's time, by peer.
        hint_bytes: bytes of the hint on disk, for one direction.
    """

    size: int
    columns: int
    us: dict[str, float]
    ratio: dict[str, float]
    hint_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the whole layer's weight in int8."""
        return self.size**2

    @property
    def ready_bytes(self) -> int:
        """Returns the bytes of one mask row and its effect row, which is packed, for the forward direction."""
        return (4 + 3) * self.size


def _run_size(size: int, repeats: int, most_columns: int, blocks: int = BLOCKS) -> _Found:
    """Measures the masks and the peers at one width.

    Args:
        size: d, the number of inputs and of outputs.
        repeats: the number of rounds.
        most_columns: the most outputs of a local layer that are computed.
        blocks: the number of blocks of masks that share transforms.
    """
    from noise.params import choose

    columns, parameters = min(size, most_columns), choose("default")
    with ExitStack() as stack:
        making = Making(size, Path(stack.enter_context(tempfile.TemporaryDirectory())), parameters)
        runs = {**_local_layer(size, columns), OURS: lambda: making.make(blocks), ONE_BLOCK: lambda: making.make(1)}
        tokens = {OURS: blocks * parameters.ring_degree, ONE_BLOCK: parameters.ring_degree}
        seconds = interleaved(runs, repeats)
        hint_bytes = making.hint_bytes
    share = columns / size
    per_token = {
        name: [each / tokens[name] if name in tokens else each / TOKENS / share for each in values]
        for name, values in seconds.items()
    }
    return _Found(
        size, columns, {name: statistics.median(values) * 1e6 for name, values in per_token.items()},
        {peer: ratios(per_token, peer)[OURS] for peer in PEERS}, hint_bytes,
    )  # fmt: skip


def run(sizes: tuple[int, ...] = SIZES, repeats: int = 5, most_columns: int = COLUMNS) -> list[_Found]:
    """Measures the masks and the peers at all widths, in the order of `sizes`."""
    return [_run_size(size, repeats, most_columns) for size in sizes]


def crossing(sizes: list[int], ratio: list[float]) -> str:
    """Returns a text that says from which width on a ratio stays at or below 1.

    The width is interpolated, on logarithmic axes, between the last size with a ratio above 1 and the next size.
    """
    above = [index for index, value in enumerate(ratio) if value > 1]
    if not above:
        return f"at every width from {sizes[0]:,}"
    last = above[-1]
    if last + 1 == len(sizes):
        return f"at no width up to {sizes[-1]:,}"
    high, low = math.log(ratio[last]), math.log(ratio[last + 1])
    size = sizes[last] * (sizes[last + 1] / sizes[last]) ** (high / (high - low))
    return f"from d ≈ {float(f'{size:.2g}'):,.0f} up"


def summary(found: list[_Found]) -> str:
    """Returns a sentence that says from which width on masks take less time, or less disk, than a local layer."""
    sizes = [each.size for each in found]
    time = ", ".join(f"in {peer} {crossing(sizes, [each.ratio[peer] for each in found])}" for peer in PEERS)
    one, both = (crossing(sizes, [count * each.hint_bytes / each.weight_bytes for each in found]) for count in (1, 2))
    return (
        f"Making masks takes less time than computing the layer locally {time}; hints take less disk than the int8 "
        f"weights {one} for the forward direction alone, {both} for both."
    )


def report(found: list[_Found]) -> None:
    """Prints the results as tables, and the summary."""
    print("| d → d, µs per token | masks | masks, 1 block | fp32 | bf16 | int8 | masks / fp32 | / bf16 | / int8 "
          "| local outputs computed |\n|" + "---|" * 10)  # fmt: skip
    for each in found:
        cells = [f"{each.us[name]:.1f}" for name in (OURS, ONE_BLOCK, *PEERS)]
        cells += [f"{each.ratio[peer]:.2f}" for peer in PEERS]
        computed = "all" if each.columns == each.size else f"{each.columns:,} of {each.size:,}, scaled"
        print(f"| {each.size:,} | {' | '.join(cells)} | {computed} |")
    print("\n| d → d | hint, forward, MB | forward and backward, MB | int8 weights, MB | both / weights "
          "| ready masks, KB a token, forward | both |\n|" + "---|" * 7)  # fmt: skip
    for each in found:
        hint, weight, ready = each.hint_bytes / 1e6, each.weight_bytes / 1e6, each.ready_bytes / 1e3
        print(f"| {each.size:,} | {hint:.1f} | {2 * hint:.1f} | {weight:.2f} | {2 * hint / weight:.2f} "
              f"| {ready:.1f} | {2 * ready:.1f} |")  # fmt: skip
    print(f"\n{summary(found)}")


def plot(found: list[_Found], file: Path) -> None:
    """Draws time per token and storage over the width, and writes the plot as an SVG file."""
    plots = pyplot()
    sizes = [each.size for each in found]
    figure, (time, disk) = plots.subplots(1, 2, figsize=(7.2, 2.9), layout="constrained")
    styles = {OURS: "o-", ONE_BLOCK: "o:", "fp32": "s--", "bf16": "^--", "int8": "v--"}
    for name, style in styles.items():
        label = name if name in (OURS, ONE_BLOCK) else f"local {name}"
        time.plot(sizes, [each.us[name] for each in found], style, label=label, markersize=3, linewidth=1)
    time.set(title="Tenant's time per token, forward", ylabel="µs")
    weights = [each.weight_bytes / 1e6 for each in found]
    for count, label in ((1, "hint, forward"), (2, "hints, both ways")):
        megabytes = [count * each.hint_bytes / 1e6 for each in found]
        disk.plot(sizes, megabytes, "o-" if count == 1 else "o:", label=label, markersize=3, linewidth=1)
    disk.plot(sizes, weights, "v--", label="int8 weights", markersize=3, linewidth=1)
    disk.set(title="Storage of the layer", ylabel="MB")
    for axes in (time, disk):
        axes.set(xscale="log", yscale="log", xlabel="hidden size d")
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)


def main() -> None:
    """Prints the tables; with `--plot` also draws the plot."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenant_cost")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--columns", type=int, default=COLUMNS, help="outputs of a local layer that are computed")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    given, _ = parser.parse_known_args()
    found = run(tuple(sorted(given.sizes)), given.repeats, given.columns)
    print(f"{torch.get_num_threads()} threads, medians of {given.repeats}\n")
    report(found)
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
