"""Two real processes on loopback: this one is rank 0, the other runs `follower`. The store is this process's, as it is
torchrun's when that starts the ranks, so no port has to be chosen beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.support.ranks import Follower
from tests.support.tiny_models import tiny_config


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    one = Follower(tmp_path_factory.mktemp("follower") / "log")
    yield one
    one.end()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with layers of 65 and 127 columns, which cannot be halved."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        config = tiny_config(kind)
        config.vocab_size = 127
        setattr(config, "intermediate_size" if kind == "llama" else "n_inner", 65)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder / kind)
    return {kind: folder / kind for kind in ("llama", "gpt2")}
