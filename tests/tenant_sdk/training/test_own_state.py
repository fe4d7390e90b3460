"""Tests that a run has its own state of accelerate, and that an adapter is drawn from the run's seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState, PartialState, is_initialized
from peft import (
    AdaLoraConfig,
    FourierFTConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from tenant_sdk.training.trainers import DrawnFrom, own_accelerate_state
from tests.support.tiny_models import make_tiny
from tests.support.waiting import WAIT_S


def start_anew(folder: Path) -> None:
    """Discards the state of accelerate and makes a new one, as every Trainer does first."""
    assert TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[]).device == torch.device("cpu")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Accelerator]:
    start_anew(tmp_path)
    made = Accelerator(cpu=True)
    yield made
    made.sync_gradients = True
    start_anew(tmp_path)


def test_a_run_leaves_the_state_of_others_alone(outside: Accelerator, tmp_path: Path) -> None:
    outside.sync_gradients = True
    with ThreadPoolExecutor(1) as pool, own_accelerate_state():
        assert not is_initialized()
        own = Accelerator(cpu=True)
        own.sync_gradients = False
        assert GradientState().sync_gradients is False
        start_anew(tmp_path)
        assert pool.submit(lambda: GradientState().sync_gradients).result(WAIT_S) is True
        assert pool.submit(lambda: PartialState().device).result(WAIT_S) == torch.device("cpu")
        assert outside.gradient_state.sync_gradients is True
        assert outside.mixed_precision == "no"
    assert GradientState().sync_gradients is True


def test_runs_in_two_threads_see_two_states() -> None:
    def run(sync: bool) -> bool:
        with own_accelerate_state():
            Accelerator(cpu=True).sync_gradients = sync
            seen = GradientState().sync_gradients
            inner.append(vars(GradientState()))
            return bool(seen)

    inner: list[dict[str, Any]] = []
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [True, False], timeout=WAIT_S)) == [True, False]
    assert inner[0] is not inner[1]


CONFIGS = [
    LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian"),
    LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=9),
    LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    LoKrConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    VeraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
    VBLoRAConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", vector_length=16, topk=1, num_vectors=8),
    FourierFTConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", n_frequency=8),
    PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("own") / "llama"
    make_tiny("llama", made)
    return made


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_an_adapter_is_what_its_seed_alone_draws(config: Any, folder: Path) -> None:
    """The adapter is compared with one made after `set_seed` alone. In the meantime another thread has used torch's
    generator."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    set_seed(5)
    expected = trainable(get_peft_model(base, config))
    base = AutoModelForCausalLM.from_pretrained(folder)
    set_seed(6)
    with DrawnFrom(5):
        got = trainable(get_peft_model(base, config))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_draws_leave_torch_s_own_generator_where_it_was() -> None:
    set_seed(1)
    before = torch.get_rng_state()
    with DrawnFrom(2):
        torch.nn.Linear(3, 4)
        torch.randn(5)
        torch.empty(3, device="meta").normal_()
    assert torch.equal(torch.get_rng_state(), before)
