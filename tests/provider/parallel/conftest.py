"""Provides rank 1 as a process of its own, and models that two ranks cannot divide evenly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import Follower
from tests.support.tiny_models import save_random, tiny_config


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    one = Follower(tmp_path_factory.mktemp("follower") / "log")
    yield one
    one.end()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provides tiny models with layers of 65 and 127 columns, which cannot be divided evenly by two ranks."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        config = tiny_config(kind)
        config.vocab_size = 127
        setattr(config, "intermediate_size" if kind == "llama" else "n_inner", 65)
        save_random(config, folder / kind)
    return {kind: folder / kind for kind in ("llama", "gpt2")}
