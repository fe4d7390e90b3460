"""Measures how long it takes to load an adapter, from host memory and from disk, until a request can use it.

Each adapter has rank 16 on all linear layers of SmolLM2-135M and is packed in bf16. Its weights are random, and the
model has only the shapes of SmolLM2-135M, so nothing is downloaded. A switch begins when a request names an adapter
that has no place on the device. A switch ends when the request can run. Files are in the page cache. The peer is PEFT's
`load_adapter`. The table also shows processor time, which depends less on other work on the machine.

`python -m benchmarks.adapters kinds` measures adapters of different PEFT kinds: the time to load one from disk, the
time of 16 rows that use it, and of 16 rows of which each uses another adapter of the kind. All linear layers of
SmolLM2-135M's shapes are adapted, except the head. Weights are random, so nothing is downloaded, and there is no
provider: base layers are computed here, in float32, on one thread. Passes with the different kinds take turns. Stores
are opened with `separate_calls`, without which they refuse OFT. Two adapters of each kind have the same settings, since
loading the first one takes longer: the store asks PEFT once which shapes it expects for these settings.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from runtime.loading import quiet_transformers
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS
from tenant_sdk.serving.adapters.targets import linear_layers, shape_of

RANK = 16
BARS_MS = {"host memory": 5.0, "disk": 40.0}


def smollm2_shapes() -> Any:
    """Returns a model with the shapes of SmolLM2-135M and random weights."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    model.name_or_path = "smollm2-135m"
    return model


def save(model: Any, folder: Path, seed: int, dtype: torch.dtype) -> None:
    """Saves a random adapter on all linear layers except the head, in the files of PEFT's format."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in linear_layers(model).items():
        if name != "lm_head":
            in_features, out_features = shape_of(layer)
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, in_features, generator=generator).to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator).to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    names = sorted({name.rpartition(".")[2] for name in linear_layers(model)} - {"lm_head"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "target_modules": names}
    (folder / CONFIG).write_text(json.dumps(config))


Times = tuple[float, float]
"""A pair of times: seconds of elapsed time, and seconds of processor time."""


def switches(model: Any, root: Path, names: list[str], count: int, host_bytes: int) -> list[Times]:
    """Returns the times of `count` switches, each to the next adapter of `names`. Every switch loads an adapter,
    because there are fewer places than adapters."""
    ready = threading.Event()
    store = AdapterStore(model, root, host_bytes=host_bytes, device_slots=2, on_ready=ready.set, preload=names)
    times = []
    for at in range(count + len(names)):
        ready.clear()
        begin = time.perf_counter(), time.process_time()
        loan = store.reserve(names[at % len(names)])
        if not loan.is_ready():
            ready.wait()
        times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        if loan.failure is not None or not loan.is_ready():
            raise SystemExit(f"a switch failed: {loan.failure}")
        loan.release()
    store.close()
    return times[len(names) :]  # without the first round, which writes to places that were never used


def _peft_switches(model: Any, root: Path, names: list[str], count: int) -> list[Times]:
    """Returns how long PEFT takes to load an adapter and make it the active one, for each load."""
    from peft import PeftModel

    from runtime.loading import quiet_transformers

    with quiet_transformers():
        adapted, times = PeftModel.from_pretrained(model, str(root / names[0]), adapter_name="first"), []
        for at in range(count):
            begin = time.perf_counter(), time.process_time()
            adapted.load_adapter(str(root / names[at % len(names)]), adapter_name="other")
            adapted.set_adapter("other")
            times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            adapted.set_adapter("first")
            adapted.delete_adapter("other")
    return times


def run(count: int = 50) -> dict[str, Times]:
    """Measures each way to load adapters, and returns a mapping from the way's name to the median times."""
    torch.set_num_threads(1)
    model, names = smollm2_shapes(), [f"a{at}" for at in range(5)]
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        roots = {}
        for dtype in (torch.float32, torch.bfloat16):
            roots[dtype] = Path(folder) / str(dtype)
            for seed, name in enumerate(names):
                save(model, roots[dtype] / name, seed, dtype)
        time.sleep(0.2)  # files that changed very recently would be read again, even with the same modification times
        one = 11_000_000  # bytes of host memory, enough for one adapter, so that every switch reads the disk
        for name, dtype, host_bytes in (
            ("host memory", torch.float32, 1 << 30),
            ("disk", torch.float32, one),
            ("disk, saved in bf16", torch.bfloat16, one),
        ):
            medians[name] = _medians(switches(model, roots[dtype], names, count, host_bytes))
        medians["PEFT's load_adapter"] = _medians(
            _peft_switches(model, roots[torch.float32], names, max(3, count // 10))
        )
    return medians


def _medians(times: list[Times]) -> Times:
    by_clock, of_processor = zip(*times, strict=True)
    return statistics.median(by_clock), statistics.median(of_processor)


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=50)
    report(parser.parse_args().switches)


def report(num_switches: int) -> None:
    """Measures the switches and prints their median times as a table, with the bars."""
    medians = run(num_switches)
    print("| switch to an adapter from | median, ms | processor, ms | bar |\n|---|---|---|---|")
    for name, (by_clock, of_processor) in medians.items():
        bar, found = BARS_MS.get(name), f"{1e3 * by_clock:.1f} | {1e3 * of_processor:.1f}"
        verdict = "" if bar is None else f"{bar:g}: {'met' if 1e3 * by_clock <= bar else 'missed'}"
        print(f"| {name} | {found} | {verdict} |")


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


def save_kind(model: Any, folder: Path, title: str) -> None:
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


def _load_ms(model: Any, root: Path, names: tuple[str, str]) -> tuple[float, float]:
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


def _save_more(root: Path, name: str) -> list[str]:
    """Saves `ROWS` adapters with the settings of another one and numbers a little different; returns their names."""
    names = [f"{name}-{number}" for number in range(ROWS)]
    for number, other in enumerate(names):
        shutil.copytree(root / name, root / other)
        path = root / other / SAFETENSORS_WEIGHTS_NAME
        changed = {key: one * (1 + number / 1000) if one.is_floating_point() and not key.endswith(FIXED) else one
                   for key, one in load_file(path).items()}  # fmt: skip
        save_file(changed, path)
    return names


def _rows_ms(model: Any, root: Path, passes: dict[str, list[str]], rounds: int) -> dict[str, float]:
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


def _compare_kinds() -> None:
    """Measures the kinds and prints the results as a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = smollm2_shapes()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = {title: (f"a{number}", f"b{number}") for number, title in enumerate(KINDS)}
        for title, both in names.items():
            for name in both:
                save_kind(model, root / name, title)
        loads = {title: _load_ms(model, root, both) for title, both in names.items()}
        one = _rows_ms(model, root, {"": [], **{title: [name] for title, (name, _) in names.items()}}, ROUNDS)
        many = {}
        for title, (name, _) in names.items():
            many |= _rows_ms(model, root, {title: _save_more(root, name)}, 2)
    print(
        f"| | read from disk, ms | a second one of its settings, ms | {ROWS} rows of one adapter, ms | of {ROWS}, ms |"
    )
    print(f"|---|---|---|---|---|\n| no adapter | | | {one['']:.0f} | |")
    for title, both in loads.items():
        print(f"| {title} | {both[0]:.0f} | {both[1]:.0f} | {one[title]:.0f} | {many[title]:.0f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["kinds"]:
        argparse.ArgumentParser("python -m benchmarks.adapters kinds", description=_compare_kinds.__doc__).parse_args(
            sys.argv[2:]
        )
        _compare_kinds()
    else:
        main()
