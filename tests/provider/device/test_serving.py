"""Tests a provider that serves from a device, on torch's `cpu` device: `provider serve` hands its weights over, and a
tenant notices nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.config import ProviderSettings
from provider.device import choice
from provider.device.on_device import OnDevice
from provider.net.admission import Admission
from provider.net.server import Server
from provider.serve import _make_model, _make_shards
from tenant_sdk import TenantClient
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import RELATIVE, adapted, batch, grads, relative
from tests.support.providers import make_served_model
from tests.support.tiny_models import make_chat_model
from tests.support.training import lora
from wire.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("device") / "tiny")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes torch's `cpu` device the chosen accelerator; returns the settings that were asked for."""
    asked: list[str] = []
    monkeypatch.setattr(choice, "choose", lambda wanted, *rest: asked.append(wanted) or torch.device("cpu"))
    return asked


def settings(folder: Path, **changes: Any) -> ProviderSettings:
    return ProviderSettings(model=str(folder), port=0, **changes)


def test_weights_are_handed_over(folder: Path, on_cpu: list[str]) -> None:
    model = make_served_model(folder, "int8")
    fingerprints = {group.info.id: group.fingerprint() for group in model.served.groups}
    with ExitStack() as ending:
        (shard,) = _make_shards(settings(folder, device="cuda:1"), model, Admission(), ending)
        assert on_cpu == ["cuda:1"]
        (replica,) = shard.replicas
        assert isinstance(replica, OnDevice)
        assert list(shard.groups) == list(range(len(fingerprints)))
        assert model.served.groups == ()
        assert model.fingerprints == fingerprints
        assert all(moved.is_whole() for moved in replica.moved_groups.values())
    assert not replica.moved_groups, "closed with the provider"


def test_with_parallel_no_device_is_chosen(folder: Path, on_cpu: list[str]) -> None:
    with ExitStack() as ending:
        (shard,) = _make_shards(
            settings(folder, parallel="tensor"), make_served_model(folder, "int8"), Admission(), ending
        )
    assert not isinstance(shard.replicas[0], OnDevice)
    assert on_cpu == []


def test_a_device_that_is_not_there_stops_the_start_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr("provider.model.load.load", lambda source: pytest.fail("the model is loaded"))
    with pytest.raises(ConfigurationError, match="this build of torch has no CUDA"):
        _make_model(settings(folder, device="cuda"))


@pytest.mark.usefixtures("on_cpu")
def test_a_tenant_notices_nothing(folder: Path, tmp_path: Path) -> None:
    """Logits and gradients under the lattice mask are those of a provider on the CPU."""
    options: dict[str, Any] = {"mask_options": TOY_OPTIONS, "cache": tmp_path / "cache", "progress": False}
    with ExitStack() as ending:
        model = make_served_model(folder, "int8")
        shards = _make_shards(settings(folder), model, Admission(), ending)
        server = Server("127.0.0.1", 0, None)
        ending.callback(server.stop)
        server.start(model, shards)
        one = ending.enter_context(TenantClient(f"grpc://127.0.0.1:{server.port}", **options))
        other = ending.enter_context(TenantClient(f"inproc:{folder}", **options))
        found, expected = (adapted(each.load_model(), lora(target_modules="all-linear")) for each in (one, other))
        ids = batch()
        with torch.no_grad():
            assert relative(found(ids).logits, expected(ids).logits) < RELATIVE
            for token in (ids[:1, :1], ids[1:, :1]):  # by the short way
                assert relative(found(token).logits, expected(token).logits) < RELATIVE
        got, want = grads(found, ids), grads(expected, ids)
        assert got.keys() == want.keys()
        assert all(relative(got[name], want[name]) < RELATIVE for name in want)
