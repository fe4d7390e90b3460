"""Measures adapters of different PEFT kinds: the time to load one from disk, and the time of 16 rows that use it.

All linear layers of SmolLM2-135M's shapes are adapted, except the head. Weights are random, so nothing is downloaded,
and there is no provider: base layers are computed here, in float32, on one thread. Passes with the different kinds take
turns. Stores are opened with `separate_calls`, without which they refuse OFT. Two adapters of each kind have the same
settings, since loading the first one takes longer: the store asks PEFT once which shapes it expects for these settings.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model

from benchmarks.adapter_loading import smollm2_shapes
from tenant_sdk.serving.adapters import AdapterStore
from wire.loading import quiet_transformers

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
            ticket = store.reserve(name)
            if not ticket.is_ready():
                ready.wait()
            each.append(1e3 * (time.perf_counter() - began))
            if ticket.failure is not None:
                raise SystemExit(f"{name}: {ticket.failure}")
            ticket.release()
        store.close()
    return statistics.median(times[0]), statistics.median(times[1])


def rows_ms(model: Any, root: Path, names: list[str]) -> dict[str | None, float]:
    """Returns, for each name of an adapter, the median time in ms of a pass of `ROWS` rows with this adapter; and for
    None, that of a pass without an adapter."""
    ids, times = torch.arange(ROWS)[None], dict[str | None, list[float]]()
    for _ in range(ROUNDS):
        for name in (None, *names):
            ready = threading.Event()
            store = AdapterStore(model, root, on_ready=ready.set, separate_calls=True)
            ticket = None if name is None else store.reserve(name)
            if ticket is not None and not ticket.is_ready():
                ready.wait()
            slot = 0 if ticket is None else ticket.slot
            with torch.no_grad(), store.in_step([slot] * ROWS):
                model(input_ids=ids, use_cache=False)  # what the first pass alone allocates
                began = time.perf_counter()
                model(input_ids=ids, use_cache=False)
                times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
            if ticket is not None:
                ticket.release()
            store.close()
    return {name: statistics.median(each) for name, each in times.items()}


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
        passes = rows_ms(model, root, [name for name, _ in names.values()])
    print(f"| | read from disk, ms | a second one of its settings, ms | {ROWS} rows of one adapter, ms |")
    print(f"|---|---|---|---|\n| no adapter | | | {passes[None]:.0f} |")
    for title, (name, _) in names.items():
        first, second = loads[title]
        print(f"| {title} | {first:.0f} | {second:.0f} | {passes[name]:.0f} |")


if __name__ == "__main__":
    main()
