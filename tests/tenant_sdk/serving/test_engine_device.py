"""Tests that an engine whose model is on a GPU answers as on the CPU, with keys and values on the GPU or on the host.

Every test also runs for the device "cpu", which shows that the test itself is right.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.kv import DEVICE_ROWS
from tests.support.cuda import cpu_and
from tests.support.engines import alone, together
from tests.support.saved_adapters import save_adapter, save_kind
from tests.support.tiny_models import PROMPTS, open_client
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
DEVICES = cpu_and("cuda")
NEW_TOKENS = 8
ERROR = 1e-4
"""The largest difference of a logit between devices; the logits of the tiny model are about one."""


@pytest.mark.parametrize("kv_device", [None, "cpu"])
@pytest.mark.parametrize("mask", ["off", "lattice"])
@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_those_of_the_cpu(folder: Path, device: str, mask: str, kv_device: str | None) -> None:
    long = "who? " * DEVICE_ROWS  # Attention of its prompt is computed on the device even if the keys are on the host.
    prompts = [*PROMPTS[:3], long[:60]]
    with open_client(folder, mask) as local:
        reference = [alone(local, prompt, NEW_TOKENS) for prompt in prompts]
    with (
        open_client(folder, mask, device=device) as client,
        Engine(client, step_tokens=64, kv_device=kv_device) as engine,
    ):
        assert engine.submit(prompts[-1], max_new_tokens=1).num_prompt_tokens >= DEVICE_ROWS
        got = together(engine, prompts, reference)
    error = max(float((have.cpu() - want).abs().max()) for have, want in zip(got, reference, strict=True))
    assert error < (ERROR if mask == "off" else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_of_several_kinds_are_applied_on_the_device(
    folder: Path, tmp_path: Path, device: str, batch_calls: list[int]
) -> None:
    """LoRA adapters of one rank are one grouped product, and the IA3 adapters one batch of PEFT's modules."""
    names = ["lora0", "lora1", "lora2", "ia30", "ia31", "ia32", "ia33"]
    prompts = [PROMPTS[0]] * len(names)
    with open_client(folder) as local:
        model = local.load_model()
        for number in range(4):
            save_adapter(model, tmp_path / f"lora{number}", seed=number)
            save_kind(model, "llama", tmp_path / f"ia3{number}", "IA3", seed=number)
        reference = [
            alone(local, prompt, NEW_TOKENS, tmp_path / name) for prompt, name in zip(prompts, names, strict=True)
        ]

    are_all_here = threading.Event()

    @contextlib.contextmanager
    def when_all_are_here() -> Iterator[None]:
        """Holds the first step until all requests are submitted, so that their answers are computed together."""
        if not are_all_here.is_set():
            until(lambda: engine.status().num_running + engine.status().num_waiting == len(names), "all requests")
            are_all_here.set()
        yield

    def store_of(model: Any, wake: Callable[[], None]) -> AdapterStore:
        return AdapterStore(model, tmp_path, on_ready=wake, dtype=torch.float32, preload=names)

    with (
        open_client(folder, device=device) as client,
        Engine(client, store_of, during_step=when_all_are_here) as engine,
    ):
        got = together(engine, prompts, reference, names)
    assert max(float((have.cpu() - want).abs().max()) for have, want in zip(got, reference, strict=True)) < ERROR
    assert set(batch_calls) == {4}
