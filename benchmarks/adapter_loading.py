"""Measures how long it takes to load an adapter, from host memory and from disk, until a request can use it.

Each adapter has rank 16 on all linear layers of SmolLM2-135M and is packed in bf16. Its weights are random, and the
model has only the shapes of SmolLM2-135M, so nothing is downloaded. A switch begins when a request names an adapter
that has no place on the device. A switch ends when the request can run. Files are
in the page cache. The peer is PEFT's `load_adapter`. The table also shows processor time, which depends less on other
work on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.files import CONFIG, WEIGHTS
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


def peft_switches(model: Any, root: Path, names: list[str], count: int) -> list[Times]:
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
            peft_switches(model, roots[torch.float32], names, max(3, count // 10))
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


if __name__ == "__main__":
    main()
