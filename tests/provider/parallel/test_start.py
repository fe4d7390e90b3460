"""Tests what ranks compare before they begin, and how a process learns that it is a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from provider.config import ProviderSettings
from provider.model.load import load, resolve
from provider.model.weights import serve_model
from provider.parallel.environment import rank_here
from provider.parallel.start import fingerprint
from wire.errors import ConfigurationError


def test_fingerprints_see_every_weight_and_the_way_of_sharing(models: dict[str, Path]) -> None:
    served = serve_model(load(resolve(str(models["gpt2"]))), "native")
    first = fingerprint("tensor", served)
    assert first == fingerprint("tensor", served)
    assert len(first) == 32
    assert first != fingerprint("fsdp", served)
    for tensor in (served.groups[1].native, served.groups[1].bias):
        assert tensor is not None
        before = tensor.flatten()[-1].item()
        tensor.view(-1)[-1] += 1.0
        assert fingerprint("tensor", served) != first
        tensor.view(-1)[-1] = before
    assert fingerprint("tensor", served) == first


def test_outside_torchrun_one_line_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="torchrun --nproc-per-node 2 --master-port"):
        rank_here("tensor")
    assert rank_here("none") == 0


@pytest.mark.parametrize("other", [{"shards": 2}, {"replicas": 2}])
def test_parallel_goes_with_neither_shards_nor_replicas(other: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="give one"):
        ProviderSettings(parallel="tensor", **other).check_parallel()
    ProviderSettings(parallel="tensor").check_parallel()
    ProviderSettings(**other).check_parallel()


def test_several_processes_that_would_all_be_servers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert rank_here("none") == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="add --parallel tensor"):
        rank_here("none")
