"""Tests that only one thread builds a model at a time, and that other threads are not affected."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import runtime.loading
from runtime.loading import loading, quiet_transformers
from tests.support.tiny_models import make_tiny
from tests.support.waiting import WAIT_S


def elsewhere(work: Callable[[], Any]) -> Any:
    """Returns the result of a call in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(WAIT_S)


def default_dtypes() -> set[torch.dtype]:
    return {
        torch.get_default_dtype(), torch.zeros(1).dtype, torch.tensor([0.5]).dtype, torch.full((1,), 0.5).dtype,
        torch.arange(0.0, 2.0).dtype, nn.Linear(1, 1).weight.dtype, torch.normal(0.0, 1.0, size=(1,)).dtype,
    }  # fmt: skip


def test_a_default_dtype_that_is_set_while_loading_is_that_thread_s_own() -> None:
    with loading():
        torch.set_default_dtype(torch.bfloat16)
        assert default_dtypes() == {torch.bfloat16}
        assert elsewhere(default_dtypes) == {torch.float32}
        elsewhere(lambda: torch.set_default_dtype(torch.float32))  # theirs does not change this one either
        assert default_dtypes() == {torch.bfloat16}
        assert torch.ones(1, dtype=torch.float64).dtype is torch.float64
        assert torch.tensor([1]).dtype is torch.int64
        assert torch.as_tensor(torch.zeros(1, dtype=torch.float32).numpy()).dtype is torch.float32
    assert default_dtypes() == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_a_model_is_the_same_bits_as_without(kind: str, dtype: Any, tmp_path: Path) -> None:
    make_tiny(kind, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    with loading():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    expected = dict([*plain.named_parameters(), *plain.named_buffers()])
    got = dict([*ours.named_parameters(), *ours.named_buffers()])
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype is tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_first_values_are_drawn_only_where_they_have_memory() -> None:
    """torch computes what is drawn on the meta device by Python code, which writes nothing."""

    class Filled(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    def make() -> list[torch.Tensor]:
        layers = nn.ModuleList([nn.Linear(3, 2), nn.Embedding(4, 2, padding_idx=0), nn.LayerNorm(2)])
        return [parameter.detach() for parameter in layers.parameters()]

    torch.manual_seed(1)
    expected = make()
    torch.manual_seed(1)
    with loading():
        assert all(map(torch.equal, make(), expected))
        with torch.device("meta"), Filled():
            made = make()
    assert [(each.shape, each.is_meta) for each in made] == [(each.shape, True) for each in expected]
    assert not {"normal_", "uniform_", "zero_", "fill_"} & set(Filled.names)


def test_no_two_threads_load_at_once() -> None:
    """A second thread waits until the first has left `loading()`. The test checks the order of events, and measures no
    time."""
    order: list[str] = []
    asks = threading.Event()

    def second() -> None:
        asks.set()
        with loading():
            order.append("second in")

    with ThreadPoolExecutor(1) as pool:
        with loading():
            waiting = pool.submit(second)
            assert asks.wait(WAIT_S)
            assert elsewhere(lambda: runtime.loading._lock.acquire(blocking=False)) is False
            order.append("first out")
        waiting.result(WAIT_S)
    assert order == ["first out", "second in"]


def test_settings_come_back_when_the_last_thread_leaves_in_whatever_order() -> None:
    filters, verbosity = list(warnings.filters), transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    first, second = quiet_transformers(), quiet_transformers()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    assert not transformers_logging.is_progress_bar_enabled()
    second.__exit__(None, None, None)
    assert transformers_logging.get_verbosity() == verbosity
    assert transformers_logging.is_progress_bar_enabled() == bars
    assert warnings.filters == filters


def test_an_error_leaves_nothing_behind() -> None:
    verbosity = transformers_logging.get_verbosity()

    def breaks() -> None:
        with loading():
            torch.set_default_dtype(torch.float16)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert default_dtypes() == {torch.float32}
    assert transformers_logging.get_verbosity() == verbosity
    with loading():  # the lock is free
        pass
