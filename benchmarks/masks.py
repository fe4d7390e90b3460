"""Measures how long it takes to make lattice masks and effects, per token, against computing the layers locally.

The effect of a mask is what unmasking subtracts. `python -m benchmarks.masks` makes secrets, errors, masks and
effects for every base layer of SmolLM2-135M, in blocks of 512 tokens with default parameters. A local forward pass
computes the same layers in float32 on 512 tokens, and both take turns. Weights and hints, which are the products of
the public matrix A and the weights, are random: no time here depends on their values. Hints lie in memory as they lie
in a file, with three bytes a number and in tiles. Each layer in turn uses the hints of one of four layers, 100 MB for
the forward direction, so that they do not fit into a processor cache. The transform of A is kept between layers; the
transforms of hints are not. Durable writes and verification are not included.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import interleaved, ratios

GROUPS = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
"""(in_features, out_features) of SmolLM2-135M's layer groups: hidden size 576, 9 heads of 64, 3 heads for keys and
values, 1,536 features inside the MLP."""

NUM_LAYERS = 30
TOKENS = 512
DISTINCT_HINTS = 4
BY_THE_POOL = {"forward": 4, "forward and backward": 3}
"""The number of blocks that a pool of 2 GiB makes together for steps of 512 tokens, by direction
(`noise.blocks.pool.MaskPool._rows_beyond`)."""


class _FileHint:
    """Is a random hint as it lies in a hint file of 24 bits a number (noise/hints/file.py), as `Columns`."""

    def __init__(self, num_rows: int, features: int) -> None:
        import numpy as np

        from noise.hints.file import TILE_FEATURES
        from noise.polynomial.kernels import PACKED_BYTES, PackedMatrix

        self.features, first = features, 4096
        data = np.random.default_rng().integers(0, 256, first + PACKED_BYTES * num_rows * features, np.uint8)
        self._packed = PackedMatrix(data, first, num_rows, features, TILE_FEATURES)

    def load(self, start: int, stop: int) -> Any:
        """Is not called where there are compiled kernels."""
        raise NotImplementedError

    def packed(self, start: int, stop: int) -> Any:
        """Returns the whole hint."""
        return self._packed


class Making:
    """Makes masks and effects of all groups of all layers. In one call, `num_blocks` blocks share the transforms."""

    def __init__(self, parameters: Any, num_layers: int) -> None:
        import torch

        from noise.polynomial import kernels
        from noise.polynomial.negacyclic import transform
        from noise.sampling import Csprng

        self._parameters, self._num_layers, self._rng = parameters, num_layers, Csprng()
        widest = max(max(widths) for widths in GROUPS.values())
        rows = parameters.dimension

        def random_matrix(features: int) -> Any:
            return torch.randint(-(2**31), 2**31 - 1, (rows, features), dtype=torch.int32)

        self._public = transform(random_matrix(widest), parameters)
        random_hint = functools.partial(_FileHint, rows) if kernels.available() else random_matrix
        self._hints: list[dict[int, Any]] = [
            {features: random_hint(features) for widths in GROUPS.values() for features in widths}
            for _ in range(min(DISTINCT_HINTS, num_layers))
        ]

    def forward(self, num_blocks: int) -> None:
        """Makes masks for all inputs, and the effects of these masks on the outputs, as a forward pass needs."""
        self._all(num_blocks, backward=False)

    def both(self, num_blocks: int) -> None:
        """Makes what `forward` makes, plus masks for the gradients of the outputs, and their effects on the gradients
        of the inputs."""
        self._all(num_blocks, backward=False)
        self._all(num_blocks, backward=True)

    def _all(self, num_blocks: int, backward: bool) -> None:
        for layer in range(self._num_layers):
            hints = self._hints[layer % len(self._hints)]
            for request, reply in GROUPS.values():
                if backward:
                    request, reply = reply, request
                self._one(num_blocks, request, hints[reply])

    def _one(self, num_blocks: int, features: int, hint: Any) -> None:
        from noise import sampling
        from noise.polynomial import negacyclic

        degree, rank = self._parameters.ring_degree, self._parameters.rank
        secrets = sampling.ternary(self._rng, (num_blocks, rank, degree))
        secrets_hat = negacyclic.secret_transform(secrets)
        negacyclic.masks_and_effects(
            self._public.first(features),
            secrets_hat,
            hint,
            lambda shape: sampling.error(self._rng, shape, self._parameters),
            self._parameters,
            packs_effects=True,
        )


def _local_forward(num_layers: int, tokens: int) -> Callable[[], None]:
    """Returns a function that computes all base layers in float32 for `tokens` rows. Each group is one product, and no
    two groups share a weight."""
    import torch

    layers = [{name: torch.randn(features, out) for name, (features, out) in GROUPS.items()} for _ in range(num_layers)]
    inputs = {name: torch.randn(tokens, features) for name, (features, _) in GROUPS.items()}

    def run() -> None:
        with torch.inference_mode():
            for layer in layers:
                for name, weight in layer.items():
                    torch.mm(inputs[name], weight)

    return run


def run(repeats: int = 5, num_layers: int = NUM_LAYERS, name: str = "default") -> dict[str, Any]:
    """Measures masks and the local forward pass.

    Returns:
        `us_per_token`: microseconds per token, by run; `ratio`: the median ratio to the local forward pass, by run;
        `ns_per_feature`: nanoseconds per token and feature, by run.
    """
    from noise.params import choose

    parameters = choose(name)
    making = Making(parameters, num_layers)
    degree = parameters.ring_degree
    runs: dict[str, Callable[[], Any]] = {"local float32 forward": _local_forward(num_layers, TOKENS)}
    tokens = {"local float32 forward": TOKENS}
    for label, make in (("forward", making.forward), ("forward and backward", making.both)):
        for num_blocks in (1, BY_THE_POOL[label], 8):
            key = f"masks and effects, {label}, {num_blocks} block{'s' * (num_blocks > 1)}"
            runs[key] = lambda make=make, num_blocks=num_blocks: make(num_blocks)
            tokens[key] = num_blocks * degree
    seconds = interleaved(runs, repeats)
    per_token = {key: [value / tokens[key] for value in values] for key, values in seconds.items()}
    features = num_layers * sum(sum(widths) for widths in GROUPS.values())
    return {
        "us_per_token": {key: statistics.median(values) * 1e6 for key, values in per_token.items()},
        "ratio": ratios(per_token, "local float32 forward"),
        "ns_per_feature": {
            key: statistics.median(values) * 1e9 / (features * (2 if "backward" in key else 1))
            for key, values in per_token.items()
        },
    }


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--parameters", default="default")
    arguments = parser.parse_args()
    result = run(arguments.repeats, arguments.layers, arguments.parameters)
    print(f"{arguments.layers} layers, {torch.get_num_threads()} threads, medians of {arguments.repeats}\n")
    print("| run | µs per token | ns per token and feature | ratio to the local forward |\n|---|---|---|---|")
    for key, ratio in result["ratio"].items():
        print(f"| {key} | {result['us_per_token'][key]:.0f} | {result['ns_per_feature'][key]:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
