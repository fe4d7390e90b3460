"""Measures adapters of different PEFT kinds: the time to load one from disk, the time of 16 rows that use it, and of 16
rows of which each uses another adapter of the kind.

All linear layers of SmolLM2-135M's shapes are adapted, except the head. Weights are random, so nothing is downloaded,
and there is no provider: base layers are computed here, in float32, on one thread. Passes with the different kinds take
turns. Stores are opened with `separate_calls`, without which they refuse OFT. Two adapters of each kind have the same
settings, since loading the first one takes longer: the store asks PEFT once which shapes it expects for these settings.
"""

from __future__ import annotations

import copy
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file

from benchmarks.adapter_loading import smollm2_shapes
from runtime.loading import quiet_transformers
from tenant_sdk.serving.adapters import AdapterStore

ROWS, ROUNDS = 16, 7
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA, rank 16": ("LORA", {"r": 16}),
    "IA3": ("IA3", {"feedforward_modules": ["down_proj"]}),
    "RoAd": ("ROAD", {"group_size": 64}),
    "AdaLoRA": ("ADALORA", {"init_r": 16, "target_r": 8, "total_step": 100}),
    "VeRA": ("VERA", {"r": 64}),
    "GraLoRA": ("GRALORA", {"r": 16}),
    "VB-LoRA": ("VBLORA", {"r": 4, "num_vectors": 64, "vector_length": 64}),
    "LoKr": ("LOKR", {"r": 16}),
    "LoHa": ("LOHA", {"r": 16}),
    "OFT": ("OFT", {"oft_block_size": 32}),
    "FourierFT": ("FOURIERFT", {"n_frequency": 1000}),
}
"""For each title, PEFT's name of the kind and its settings."""
FIXED = ("vera_A", "vera_B")
"""The ends of the names of tensors that training does not change, and that all adapters of a kind have in common."""


def save(model: Any, folder: Path, title: str) -> None:
    """Saves an adapter of the kind `title` in PEFT's format, with random numbers added to its trainable parameters."""
    kind, settings = KINDS[title]
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](target_modules=LAYERS, task_type="CAUSAL_LM", **settings)
    with quiet_transformers():
        adapted = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    adapted.save_pretrained(folder, save_embedding_layers=False)


def load_ms(model: Any, root: Path, names: tuple[str, str]) -> tuple[float, float]:
    """Returns two median times in ms: how long a new store takes to load the first adapter from disk onto the device,
    and then the second one, which has the same settings. Raises SystemExit if an adapter cannot be loaded."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        ready = threading.Event()
        store = AdapterStore(model, root, on_ready=ready.set, separate_calls=True)
        for name, each in zip(names, times, strict=True):
            ready.clear()
            began = time.perf_counter()
            loan = store.reserve(name)
            if not loan.is_ready():
                ready.wait()
            each.append(1e3 * (time.perf_counter() - began))
            if loan.failure is not None:
                raise SystemExit(f"{name}: {loan.failure}")
            loan.release()
        store.close()
    return statistics.median(times[0]), statistics.median(times[1])


def save_more(root: Path, name: str) -> list[str]:
    """Saves `ROWS` adapters with the settings of another one and numbers a little different; returns their names."""
    names = [f"{name}-{number}" for number in range(ROWS)]
    for number, other in enumerate(names):
        shutil.copytree(root / name, root / other)
        path = root / other / SAFETENSORS_WEIGHTS_NAME
        changed = {key: one * (1 + number / 1000) if one.is_floating_point() and not key.endswith(FIXED) else one
                   for key, one in load_file(path).items()}  # fmt: skip
        save_file(changed, path)
    return names


def rows_ms(model: Any, root: Path, passes: dict[str, list[str]], rounds: int) -> dict[str, float]:
    """Returns, for each pass, the median time in ms of a step of `ROWS` rows, in which the adapters that the pass names
    have as many rows each; no adapter stands for the base model."""
    ids, times = torch.arange(ROWS)[None], dict[str, list[float]]()
    for _ in range(rounds):
        for title, names in passes.items():
            bell = threading.Condition()

            def ring(bell: threading.Condition = bell) -> None:
                with bell:
                    bell.notify_all()

            store = AdapterStore(model, root, on_ready=ring, separate_calls=True)
            loans = [store.reserve(name) for name in names]
            with bell:
                while any(one.failure is None and not one.is_ready() for one in loans):
                    bell.wait(0.1)
            indices = sorted(loan.adapter_index for loan in loans for _ in range(ROWS // len(loans))) or [0] * ROWS
            with torch.no_grad(), store.in_step(indices):
                model(input_ids=ids, use_cache=False)  # what the first pass alone allocates
                began = time.perf_counter()
                model(input_ids=ids, use_cache=False)
                times.setdefault(title, []).append(1e3 * (time.perf_counter() - began))
            for loan in loans:
                loan.release()
            store.close()
    return {title: statistics.median(each) for title, each in times.items()}


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = smollm2_shapes()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = {title: (f"a{number}", f"b{number}") for number, title in enumerate(KINDS)}
        for title, both in names.items():
            for name in both:
                save(model, root / name, title)
        loads = {title: load_ms(model, root, both) for title, both in names.items()}
        one = rows_ms(model, root, {"": [], **{title: [name] for title, (name, _) in names.items()}}, ROUNDS)
        many = {}
        for title, (name, _) in names.items():
            many |= rows_ms(model, root, {title: save_more(root, name)}, 2)
    print(
        f"| | read from disk, ms | a second one of its settings, ms | {ROWS} rows of one adapter, ms | of {ROWS}, ms |"
    )
    print(f"|---|---|---|---|---|\n| no adapter | | | {one['']:.0f} | |")
    for title, both in loads.items():
        print(f"| {title} | {both[0]:.0f} | {both[1]:.0f} | {one[title]:.0f} | {many[title]:.0f} |")


if __name__ == "__main__":
    main()
