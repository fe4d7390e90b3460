"""Tests that an engine whose model is on a GPU answers as on the CPU, with keys and values on the GPU or on the host.

Every test also runs for the device "cpu", which shows that the test itself is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.module_batch import ModuleBatch
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.host_kv import DEVICE_ROWS
from tests.support.logits_recorder import alone, together
from tests.support.saved_adapters import save_adapter
from tests.support.saved_kinds import save_kind
from tests.support.served_kinds import PROMPTS, make_model, open_client

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ]),
]  # fmt: skip
NEW_TOKENS = 8
ERROR = 1e-4
"""The largest difference of a logit between devices; the logits of the tiny model are about one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("device") / "llama")


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
        got = together(engine, prompts, reference)
    error = max(float((have.cpu() - want).abs().max()) for have, want in zip(got, reference, strict=True))
    assert error < (ERROR if mask == "off" else 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_of_several_kinds_are_applied_on_the_device(
    folder: Path, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
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
    together_counts: list[int] = []
    run = ModuleBatch.outputs

    def counted(batch: ModuleBatch, modules: Sequence[nn.Module], *rows: torch.Tensor) -> torch.Tensor:
        together_counts.append(len(modules))
        return run(batch, modules, *rows)

    monkeypatch.setattr(ModuleBatch, "outputs", counted)
    with (
        open_client(folder, device=device) as client,
        Engine(client, lambda model, wake: AdapterStore(model, tmp_path, on_ready=wake, dtype=torch.float32)) as engine,
    ):
        got = together(engine, prompts, reference, names)
    assert max(float((have.cpu() - want).abs().max()) for have, want in zip(got, reference, strict=True)) < ERROR
    assert set(together_counts) == {4}
