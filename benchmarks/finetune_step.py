"""Measures a fine-tuning step of 2 × 256 tokens, with a provider over mTLS loopback and with local transformers + PEFT.

Provider and tenant share the machine. A run in int8 `ring` arithmetic without a mask sends rows of 32-bit numbers, as a
masked run does. Each side runs in a process of its own with its own settings (the local peer with torch's defaults),
and the sides take turns. `lattice` makes its masks inside the step, in the calling thread, so that no masks are made
during another run; a turn of this run is `CYCLE` steps, and their mean is the result. In runs with "masks ready", the
masks are made before the clock starts, in a pool of `READY_BYTES`, since the default pool does not hold a step's.

`python -m benchmarks.finetune_step dora` measures a DoRA step beside a LoRA step, over a provider and with local
transformers + PEFT. There the provider computes in int8 `ring` arithmetic without a mask, and the bytes are those of
one step on the wire.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import Providers, Worker, interleaved, local_model, provider, ratios, serve_worker

SHAPE = (2, 256)
CYCLE = 3
READY_BYTES = 2 << 30
WARM_STEPS = 2
"""The number of steps before the measurement. After the second step, the pool knows how many masks a step needs."""
VARIANTS = {
    # name: (weights, mask, whether masks are made before the clock starts, whether replies are verified)
    "native float, off": ("native", "off", "", ""),
    "int8 ring, off": ("int8", "off", "", ""),
    "int8 ring, off, by gRPC": ("int8", "off", "", ""),
    "int8 ring, off, by ipc": ("int8", "off", "", ""),
    "lattice, masks made in the step": ("int8", "lattice", "", ""),
    "lattice, masks ready": ("int8", "lattice", "ready", ""),
    "lattice, masks ready, by ipc": ("int8", "lattice", "ready", ""),
    "lattice, masks ready, verified": ("int8", "lattice", "ready", "verified"),
}
DEFAULT = tuple(name for name in VARIANTS if not name.endswith("by ipc"))
"""The variants that are measured if none are named. All of them at once would need more than 24 GiB of memory."""
PAIRS = (
    ("masks ready / off", "lattice, masks ready", "int8 ring, off"),
    ("verified / not", "lattice, masks ready, verified", "lattice, masks ready"),
    ("ipc / tensor port, off", "int8 ring, off, by ipc", "int8 ring, off"),
    ("ipc / tensor port, masks ready", "lattice, masks ready, by ipc", "lattice, masks ready"),
)
"""Pairs of variants whose ratio is reported, each with the ratio's name."""


def step_of(
    model: Any, shape: tuple[int, int] = SHAPE, vocabulary: int = 40_000, use_dora: bool = False
) -> Callable[[], float]:
    """Returns a function that takes one LoRA or DoRA step (forward pass, backward pass, AdamW) and returns the loss.
    The batch has random token ids from 100 to `vocabulary` - 1, and is on the model's device."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tenant_sdk import for_remote_base

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=use_dora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, for_remote_base(config))
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(100, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(model.device)

    def step() -> float:
        loss = peft_model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _remote_step(url: str, folder: str, mask: str, ready: str, verified: str) -> None:
    """Runs one tenant that takes fine-tuning steps, as a `Worker` process.

    Args:
        url: the provider's URL.
        folder: the folder with the tenant's identity.
        mask: the tenant's mask.
        ready: an empty text if masks are made in the step; otherwise they are made before the clock starts.
        verified: an empty text if replies are not verified.
    """
    import tenant_sdk

    tenant_sdk.tune()
    options: dict[str, Any] = {"background": False} if mask == "lattice" else {}
    if ready:
        options["pool_bytes"] = READY_BYTES
    with tenant_sdk.TenantClient(
        url, identity=Path(folder) / "bench", mask=mask, mask_options=options, cache=folder,
        verify="smollm2-135m" if verified else None,
    ) as client:  # fmt: skip
        client.fetch_hints(backward=True)
        prepare = (lambda: client.prepare(SHAPE[0] * SHAPE[1], backward=True)) if ready else None
        step = step_of(client.load_model())
        for _ in range(WARM_STEPS):
            step()
        serve_worker(step if ready or mask == "off" else lambda: [step() for _ in range(CYCLE)], prepare)


def run(repeats: int = 5, names: Sequence[str] = DEFAULT, bf16: bool = True) -> dict[str, Any]:
    """Measures the variants and the local peers.

    Args:
        repeats: the number of rounds.
        names: the names of the `VARIANTS` to measure.
        bf16: whether a local step in bfloat16 is measured too; it takes minutes on a processor without bfloat16.

    Returns:
        `seconds`: the median seconds of a step. `ratios` and `ratios to bf16`: the median ratios to the local steps.
            `pairs`: the median ratios of those `PAIRS` that were measured; absent if there are none.
    """
    with ExitStack() as stack:
        workers = {"local fp32": stack.enter_context(Worker(__name__, "local", "float32"))}
        if bf16:
            workers["local bf16"] = stack.enter_context(Worker(__name__, "local", "bfloat16"))
        providers = Providers(stack)
        for name in names:
            weights, *settings = VARIANTS[name]
            where = providers.of(name.rpartition(", by ")[2] if ", by " in name else "", "--weights", weights)
            workers[name] = stack.enter_context(Worker(__name__, "remote", where.url, where.folder, *settings))
        runs = {name: worker.run for name, worker in workers.items()}
        seconds = interleaved(runs, repeats, before={name: worker.prepare for name, worker in workers.items()})
    for name in seconds.keys() & {"lattice, masks made in the step"}:
        seconds[name] = [value / CYCLE for value in seconds[name]]
    found = {
        "seconds": {k: statistics.median(v) for k, v in seconds.items()},
        "ratios": ratios(seconds, "local fp32"),
        "ratios to bf16": ratios(seconds, "local bf16") if bf16 else {},
    }
    for label, one, other in PAIRS:
        if one in seconds and other in seconds:
            found.setdefault("pairs", {})[label] = ratios(seconds, other)[one]
    return found


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune_step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--no-bf16", action="store_true", help="where the processor has none")
    given = parser.parse_args()
    result = run(given.repeats, given.variants, not given.no_bf16)
    tokens = SHAPE[0] * SHAPE[1]
    print("| fine-tuning step 2×256 | s | tokens/s | × local fp32 | × local bf16 |\n|---|---|---|---|---|")
    for name, value in result["seconds"].items():
        narrow = result["ratios to bf16"].get(name)
        shown = "" if narrow is None else f"{narrow:.2f}"
        print(f"| {name} | {value:.2f} | {tokens / value:.0f} | {result['ratios'][name]:.2f} | {shown} |")
    for label, ratio in result.get("pairs", {}).items():
        print(f"{label}: {ratio:.2f}")


KINDS = ("LoRA", "DoRA")


def _remote_kind(url: str, folder: str, kind: str) -> None:
    """Runs one tenant that takes training steps, as a `Worker` process, and writes the traffic of a step to a file."""
    import tenant_sdk

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(url, identity=Path(folder) / "bench", mask="off", cache=folder) as client:
        step = step_of(client.load_model(), use_dora=kind == "DoRA")
        step()
        before = client.traffic
        step()
        after = client.traffic
        up, down = after.bytes_up - before.bytes_up, after.bytes_down - before.bytes_down
        calls = after.calls - before.calls
        said = f"{kind}: {calls} calls, {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down a step"
        (Path(folder) / kind).write_text(said)
        serve_worker(step)


def _run_kinds(repeats: int = 5) -> dict[str, Any]:
    """Returns the median seconds of a step by run, the traffic, and median ratios of one run to another."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url, _ = stack.enter_context(provider(Path(folder)))
        workers = {}
        for kind in KINDS:
            workers[f"local {kind}"] = stack.enter_context(Worker(__name__, "kind-local", kind))
            workers[f"remote {kind}"] = stack.enter_context(Worker(__name__, "kind-remote", url, folder, kind))
        seconds = interleaved({name: worker.run for name, worker in workers.items()}, repeats)
        traffic = [(Path(folder) / kind).read_text() for kind in KINDS]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "traffic": traffic,
        "remote DoRA / remote LoRA": ratios(seconds, "remote LoRA")["remote DoRA"],
        "local DoRA / local LoRA": ratios(seconds, "local LoRA")["local DoRA"],
        "remote DoRA / local DoRA": ratios(seconds, "local DoRA")["remote DoRA"],
    }


def _compare_dora(arguments: Sequence[str]) -> None:
    """Compares DoRA with LoRA and prints its results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune_step dora")
    parser.add_argument("--repeats", type=int, default=5)
    result = _run_kinds(parser.parse_args(arguments).repeats)
    print(f"| step {SHAPE[0]}×{SHAPE[1]} | s |\n|---|---|")
    for name, value in result.pop("seconds").items():
        print(f"| {name} | {value:.2f} |")
    print(*result.pop("traffic"), sep="\n")
    for name, ratio in result.items():
        print(f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        import torch

        serve_worker(step_of(local_model().to(getattr(torch, sys.argv[2]))))
    elif sys.argv[1:2] == ["remote"]:
        _remote_step(*sys.argv[2:])
    elif sys.argv[1:2] == ["dora"]:
        _compare_dora(sys.argv[2:])
    elif sys.argv[1:2] == ["kind-local"]:
        serve_worker(step_of(local_model(), use_dora=sys.argv[2] == "DoRA"))
    elif sys.argv[1:2] == ["kind-remote"]:
        _remote_kind(*sys.argv[2:])
    else:
        main()
