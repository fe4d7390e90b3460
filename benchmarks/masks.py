"""Measures making lattice masks and effects against computing the same base layers locally, per token.

`python -m benchmarks.masks` makes secrets, errors, masks and effects of every base layer of SmolLM2-135M, in blocks of
512 tokens with default parameters. The peer is the float32 forward of the same layers on 512 tokens in the same run;
both take turns. Weights and hints are random (no cost here depends on them); hints of four layers are cycled, 130 MB
forward, so that no cache holds them. The transform of A is kept, those of hints are not. Durable writes, packed hints
and verification are not included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import interleaved, ratios

GROUPS = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
"""(in, out) of SmolLM2-135M's layer groups: hidden size 576, 9 heads of 64, 3 heads for keys and values, 1,536 inside
the MLP."""

NUM_LAYERS = 30
TOKENS = 512
DISTINCT_HINTS = 4
BY_THE_POOL = {"forward": 4, "forward and backward": 3}
"""Blocks that a pool of 2 GiB makes together for steps of 512 tokens (`noise.blocks.pool.MaskPool._rows_beyond`)."""


class Making:
    """Masks and effects of all groups of all layers; `num_blocks` blocks share the transforms."""

    def __init__(self, parameters: Any, num_layers: int) -> None:
        import torch

        from noise.polynomial.negacyclic import transform
        from noise.sampling import Csprng

        self._parameters, self._num_layers, self._rng = parameters, num_layers, Csprng()
        widest = max(max(widths) for widths in GROUPS.values())
        rows = parameters.dimension

        def random_matrix(features: int) -> Any:
            return torch.randint(-(2**31), 2**31 - 1, (rows, features), dtype=torch.int32)

        self._public = transform(random_matrix(widest), parameters)
        self._hints = [
            {features: random_matrix(features) for widths in GROUPS.values() for features in widths}
            for _ in range(min(DISTINCT_HINTS, num_layers))
        ]

    def forward(self, num_blocks: int) -> None:
        """Makes a mask of the inputs and an effect on the outputs."""
        self._all(num_blocks, backward=False)

    def both(self, num_blocks: int) -> None:
        """Makes these, and a mask of the outputs' gradient with its effect on the inputs' gradient."""
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
        error = sampling.error(self._rng, (num_blocks, degree, features), self._parameters)
        negacyclic.combine(self._public.first(features), secrets_hat, error)
        negacyclic.product(hint, secrets_hat, self._parameters)


def local_forward(num_layers: int, tokens: int) -> Callable[[], None]:
    """Returns the base layers' products in float32; each layer has weights of its own, and members of a group are
    fused."""
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
    """Returns, per token, microseconds of each run and its ratio to the local forward; and nanoseconds per token and
    feature."""
    from noise.params import choose

    parameters = choose(name)
    making = Making(parameters, num_layers)
    degree = parameters.ring_degree
    runs: dict[str, Callable[[], Any]] = {"local float32 forward": local_forward(num_layers, TOKENS)}
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
    """Prints the table."""
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
