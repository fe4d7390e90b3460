"""Tests where a tenant's masks are made: on its GPU, unless a provider on the same host may use that GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from noise import staging
from noise.masks.lattice import Lattice
from noise.polynomial import negacyclic
from noise.polynomial.toeplitz import DeviceProducts
from noise.scheme import RowEncoder
from tenant_sdk import TenantClient
from tenant_sdk.model.send import RemoteExecutor
from tenant_sdk.plan import Plan, make_plan
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import RELATIVE, relative
from tests.support.tiny_models import make_chat_model
from wire.errors import ConfigurationError
from wire.frame import Direction

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def plan(url: str | list[str], **options: Any) -> Plan:
    settings: dict[str, Any] = dict.fromkeys(("identity", "verify", "arithmetic", "mask_options", "weights", "cache"))
    settings |= {"mask": "lattice", "kappa": 40, "tokenizer": None, "pad_rows": False, "accept_changes": ()}
    return make_plan(url=url, **(settings | options))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("url", "is_apart"),
    [
        ("grpcs://provider.example:8443", True),
        ("grpcs://192.0.2.7:8443", True),
        ("grpcs://[2001:db8::1]:8443", True),
        ("grpcs://localhost:8443", False),
        ("grpcs://127.0.0.1:8443", False),
        ("grpcs://127.1.2.3", False),
        ("grpcs://[::1]:8443", False),
        ("grpcs://0.0.0.0:8443", False),
        ("grpc://127.0.0.1:8443", False),
        ("inproc:smollm2-135m", False),
        (["grpcs://provider.example:1", "grpcs://localhost:2"], False),
    ],
)
def test_masks_are_made_on_the_gpu_if_the_provider_is_elsewhere(url: str | list[str], is_apart: bool) -> None:
    gpu = torch.device("cuda:1")
    assert plan(url, device="cuda:1").mask_device == (gpu if is_apart else None)
    assert plan(url, device="cuda:1", trust_same_gpu=True).mask_device == gpu
    for trust in (False, True):
        assert plan(url, device="cpu", trust_same_gpu=trust).mask_device is None


@pytest.mark.usefixtures("two_gpus")
def test_the_current_gpu_is_the_one_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that start one process for each GPU make another device than 0 the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made = plan("inproc:smollm2-135m", device="cuda", trust_same_gpu=True)
    assert made.device == made.mask_device == made.window_device == torch.device("cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_windows_need_the_users_trust_and_a_gpu() -> None:
    for options in ({"device": "cuda:1"}, {"device": "cpu", "trust_same_gpu": True}):
        assert plan("inproc:smollm2-135m", **options).window_device is None


@pytest.mark.usefixtures("two_gpus")
def test_this_hosts_own_name_is_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    assert plan("grpcs://box:8443", device="cuda").mask_device is None


@pytest.mark.usefixtures("two_gpus")
def test_no_such_device_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="no device cuda:2: this machine has 2, counted from 0"):
        TenantClient("inproc:smollm2-135m", device="cuda:2")


@pytest.mark.parametrize(
    ("device", "line"),
    [("gpu", "expected a device such as cpu or cuda:0, got 'gpu'"), ("cuda", "device cuda needs an NVIDIA GPU")],
)
def test_a_device_that_cannot_be_is_one_line(device: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError) as caught:
        TenantClient("inproc:smollm2-135m", device=device)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provides a client of a small model, whose masks are made by the device's code on torch's `cpu` device."""
    monkeypatch.setattr("tenant_sdk.plan.mask_device_of", lambda *given: torch.device("cpu"))
    with TenantClient(
        f"inproc:{make_chat_model(tmp_path / 'tiny')}", cache=tmp_path / "cache", progress=False,
        mask_options=TOY_OPTIONS,
    ) as made:  # fmt: skip
        yield made


def test_a_whole_model_runs_on_masks_of_the_device(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("combine", "product"):
        monkeypatch.setattr(negacyclic, name, lambda *given: pytest.fail("masks are made on the device"))
    model, ids = client.load_model(), torch.tensor([[1, 5, 9, 2]])
    scheme = model_executor(client).scheme
    assert isinstance(scheme, Lattice)
    assert isinstance(scheme.polynomials, DeviceProducts)
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def model_executor(client: TenantClient) -> RemoteExecutor:
    client.connect()
    session = client._session
    assert session is not None
    return session.executor


def test_a_row_of_a_device_takes_the_short_way(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is copied to the CPU, where the encoder of single rows takes it, and its copy is overwritten."""
    client.load_model()
    executor, encoded = model_executor(client), []
    model = client.load_model()
    group = next(module._group for module in model.modules() if getattr(module, "_group", None) is not None)
    row = torch.randn(1, group.spec.in_features)
    encode = RowEncoder.encode
    monkeypatch.setattr(
        RowEncoder, "encode", lambda self, spec, way, rows: encoded.append(rows) or encode(self, spec, way, rows)
    )
    expected = executor.run(group.spec, Direction.FORWARD, row)
    monkeypatch.setattr(staging, "is_here", lambda tensor: tensor.data_ptr() != row.data_ptr())
    found = executor.run(group.spec, Direction.FORWARD, row)
    assert relative(found, expected) < RELATIVE
    assert [each.data_ptr() == row.data_ptr() for each in encoded] == [True, False]
    assert not encoded[1].any()
