"""Measures one linear layer under the lattice mask against the same layer under homomorphic encryption, per token.

The peer is the encrypted matrix product of Concrete ML (the wheel `concrete-ml-extensions`, on the CPU, with its
default parameters): encrypt, multiply, decrypt. Our side includes everything that a call does: secrets, errors, masks
and their effects on the product, the durable reservation of mask rows, encoding, the provider's product in this
process, and unmasking. Neither side includes transport. Both sides have the same numbers of rows and features, use
every core, and take turns. Work that is done once is printed but not counted: the peer's keys and our hint, which is
the product of the public matrix and the weight. Masks are made eight blocks at a time, and each block is for 512
tokens. The counted time includes making and using all of these masks. The "first call" finds no masks, and makes a
whole block for its 16 tokens.

The wheel is not a dependency of this repository. `--peer-python` names an interpreter that has the wheel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

WIDTH = 576
"""The number of inputs, and of outputs, of the layer. It is the width of the one layer that is served, the output
projection in the model of `benchmarks.transport.make_model`."""
TOKENS = 16
BLOCKS = 8
"""The number of blocks of masks that are made together and share transforms, as the pool's worker thread does
(noise/masks/lattice.py)."""
DEFAULT_PEER = Path(tempfile.gettempdir()) / "concrete-peer" / "bin" / "python"
HOW_TO = "python3 -m venv {0} && {0}/bin/pip install concrete-ml-extensions==0.2.0 numpy"


class _Ours:
    """Runs a 576 → 576 layer of a provider in this process under a tenant's mask; no masks are made in the
    background."""

    def __init__(self, folder: Path) -> None:
        import torch

        from benchmarks.transport import make_model
        from noise.hints.store import HintStore
        from noise.ledger.ledger import Ledger
        from noise.masks.lattice import Lattice
        from noise.params import choose
        from provider.model.load import load, resolve
        from provider.model.served_model import ServedModel
        from provider.model.weights import serve_model
        from tenant_sdk.model.build import group_spec
        from tenant_sdk.model.send import RemoteExecutor
        from wire.frame import Direction
        from wire.limits import Limits
        from wire.transport.inproc import InprocConnection

        make_model(folder / "model")
        served = serve_model(load(resolve(str(folder / "model"))), "int8", "*o_proj")
        ledger, hints = Ledger.open(folder / "ledger", "benchmark"), HintStore(folder / "hints")
        self._mask = Lattice(choose("default"), ledger, hints, background=False)
        self._executor = RemoteExecutor([InprocConnection(ServedModel(served))], self._mask, Limits())
        (weights,) = served.groups
        (layer,) = weights.info.layers
        self._group = group_spec(weights.info, {layer.name: weights.alpha}, torch.device("cpu"))
        self._direction = Direction.FORWARD
        self._weight = weights.quantised.float() * weights.alpha
        self._rows = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        self._mask.prefetch(self._group, self._direction)
        self.hint_s = time.perf_counter() - began
        self.block_tokens = self._mask.parameters.ring_degree

    def call(self) -> Any:
        """Returns the product of one call with TOKENS tokens."""
        return self._executor.run(self._group, self._direction, self._rows)

    def first_call_s(self) -> float:
        """Returns the seconds of a call that finds no mask ready and so has to make a whole block of masks.

        The rest of the block is used up after the measurement.
        """
        began = time.perf_counter()
        self.call()
        seconds = time.perf_counter() - began
        for _ in range(self.block_tokens // TOKENS - 1):
            self.call()
        return seconds

    def blocks_s(self) -> float:
        """Returns the seconds that it takes to make BLOCKS blocks of masks and to use all of them in calls."""
        began = time.perf_counter()
        self._mask.prepare(self._group, self._direction, BLOCKS * self.block_tokens)
        for _ in range(BLOCKS * self.block_tokens // TOKENS):
            self.call()
        return time.perf_counter() - began

    def relative_error(self) -> float:
        """Returns the largest error against the float product with the same int8 weight, divided by the
        product's largest number.

        The calls use exactly one block of masks.
        """
        right = self._rows @ self._weight
        found = [self.call() for _ in range(self.block_tokens // TOKENS)]
        return max(float((each - right).abs().max() / right.abs().max()) for each in found)

    def close(self) -> None:
        """Drops secrets and closes the connection."""
        self._executor.close()


class _Peer:
    """Runs the encrypted product in a process of its own."""

    def __init__(self, python: Path) -> None:
        script = Path(__file__).with_name("concrete_peer.py")
        self._process = subprocess.Popen(
            [str(python), str(script), *map(str, (TOKENS, WIDTH, WIDTH))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.keys_s = self._answer()["keys_s"]

    def call(self) -> dict[str, float]:
        """Computes one product of TOKENS tokens and returns the seconds of each stage, the bytes and the error."""
        if self._process.stdin is not None:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("the peer ended early; its own words are above")
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def missing(python: Path) -> str | None:
    """Returns a message that says how to make the environment that the peer needs; None if the peer can be used."""
    try:
        probe = subprocess.run([str(python), "-c", "import concrete_ml_extensions, numpy"], capture_output=True)
    except OSError:
        probe = None
    if probe is not None and probe.returncode == 0:
        return None
    how_to = HOW_TO.format(DEFAULT_PEER.parent.parent)
    return f"{python} cannot import concrete_ml_extensions. The default of --peer-python can: {how_to}"


def run(python: Path = DEFAULT_PEER, rounds: int = 1, repeats: int = 9) -> dict[str, float]:
    """Measures both sides, which take turns, and returns medians: seconds per token, ratios, errors and bytes, by
    name."""
    seconds: dict[str, list[float]] = {"ours": [], "first": [], "peer": []}
    with ExitStack() as stack:
        ours = _Ours(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(ours.close)
        peer = _Peer(python)
        stack.callback(peer.close)
        error = ours.relative_error()  # this is also the warm-up
        for _ in range(rounds):
            firsts = [ours.first_call_s() for _ in range(repeats)]
            seconds["first"].append(statistics.median(firsts) / TOKENS)
            wholes = [ours.blocks_s() for _ in range(repeats)]
            seconds["ours"].append(statistics.median(wholes) / (BLOCKS * ours.block_tokens))
            answer = peer.call()
            seconds["peer"].append(sum(answer[stage] for stage in ("encrypt_s", "product_s", "decrypt_s")) / TOKENS)
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "ratio": statistics.median(b / a for a, b in zip(seconds["ours"], seconds["peer"], strict=True)),
        "first ratio": statistics.median(b / a for a, b in zip(seconds["first"], seconds["peer"], strict=True)),
        "error": error,
        "peer error": answer["relative_error"],
        "peer bytes": (answer["bytes_up"] + answer["bytes_down"]) / TOKENS,
        "hint_s": ours.hint_s,
        "keys_s": peer.keys_s,
    }


def report(found: dict[str, float]) -> None:
    """Prints the results as a table."""
    print(f"| {WIDTH} → {WIDTH}, {TOKENS} tokens a call | per token and layer | × faster than the peer "
          "| largest relative error | bytes a token | once |\n|---|---|---|---|---|---|")  # fmt: skip
    print(f"| encrypted matmul (concrete-ml-extensions) | {found['peer']:.2f} s | 1 | {found['peer error']:.1e} "
          f"| {found['peer bytes']:,.0f} | keys {found['keys_s']:.1f} s |")  # fmt: skip
    print(f"| lattice, masks included | {found['ours'] * 1e6:.1f} µs | {found['ratio']:,.0f} | {found['error']:.1e} "
          f"| {8 * WIDTH:,} | hint {found['hint_s']:.2f} s |")  # fmt: skip
    print(f"| lattice, first call: a block of masks for {TOKENS} tokens | {found['first'] * 1e6:.0f} µs "
          f"| {found['first ratio']:,.0f} | | | |")  # fmt: skip


def main() -> None:
    """Prints the table, or a message that says how to make the peer's environment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encrypted_matmul")
    parser.add_argument("--peer-python", type=Path, default=DEFAULT_PEER, help=f"default {DEFAULT_PEER}")
    parser.add_argument("--rounds", type=int, default=1, help="each takes the peer a minute or more")
    parser.add_argument("--repeats", type=int, default=9, help="of ours in a round")
    given, _ = parser.parse_known_args()
    problem = missing(given.peer_python)
    if problem is not None:
        print(problem, file=sys.stderr)
        sys.exit(2)
    report(run(given.peer_python, given.rounds, given.repeats))


if __name__ == "__main__":
    main()
