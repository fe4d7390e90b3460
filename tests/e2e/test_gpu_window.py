"""Tests a tenant that shares a GPU with its provider, from end to end: with a mask, large calls go through the window,
and logits and gradients are those of any other tenant; without one, nothing does. The GPU is torch's `cpu` device."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.device.on_device import OnDevice
from provider.engine.profile import make_scheduler
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.net.server import Server
from provider.net.windows import Windows
from provider.schedule.fairness import Policy
from provider.shards.router import Shard
from tenant_sdk import TenantClient, session
from tests.support.cuda import UNIT, stand_in
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import RELATIVE, adapted, batch, grads, relative
from tests.support.providers import make_served_model
from tests.support.tiny_models import make_chat_model
from tests.support.training import lora
from wire.payload import Payload
from wire.transport.ipc import window as window_module

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
CPU = torch.device("cpu")


@pytest.mark.parametrize("mask", ["lattice", "pad", "off"])
def test_masked_calls_go_through_the_window(tmp_path: Path, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Payload] = []
    take = window_module.TenantWindow.take

    def spy(self: Any, call: Any, payload: Payload, reply_cols: int) -> Any:
        area = take(self, call, payload, reply_cols)
        if area is not None:
            taken.append(payload)
        return area

    monkeypatch.setattr(window_module, "LEAST_BYTES", 1)
    monkeypatch.setattr(window_module.TenantWindow, "take", spy)
    plain = session.IpcConnection
    monkeypatch.setattr(
        session, "IpcConnection", lambda *given: partial(plain, gpu=CPU, driver=stand_in().library)(*given[:3])
    )
    folder = make_chat_model(tmp_path / "tiny")
    options: dict[str, Any] = {"mask": mask, "arithmetic": "ring", "cache": tmp_path / "cache", "progress": False}
    if mask == "lattice":
        options["mask_options"] = TOY_OPTIONS
    if mask == "pad":
        options |= {"verify": folder, "mask_options": {"precision": "exact"}}
    with ExitStack() as ending:
        model = make_served_model(folder, "int8")
        replica = OnDevice(list(model.served.groups), CPU)
        ending.callback(replica.close)
        shard = Shard(
            range(len(model.manifest().groups)), [replica], make_scheduler(model.served, Policy(), profiled=False)
        )
        state = StateDir(tmp_path / "state")
        server = Server("127.0.0.1", 0, state, tensor_port=None, ipc=tmp_path / "ipc")
        ending.callback(server.stop)
        windows = Windows(CPU, 16 * UNIT, stand_in().library)
        server.start(model, [shard], windows=windows)
        enroll(state, "acme", tmp_path / "acme", f"grpcs://127.0.0.1:{server.port}")
        near = ending.enter_context(TenantClient(f"ipc:{tmp_path / 'ipc'}", identity=tmp_path / "acme", **options))
        other = ending.enter_context(TenantClient(f"inproc:{folder}", **options))
        found, expected = (adapted(each.load_model(), lora(target_modules="all-linear")) for each in (near, other))
        ids = batch()
        with torch.no_grad():
            assert relative(found(ids).logits, expected(ids).logits) < RELATIVE
        assert windows.taken_bytes == 8 * UNIT
        got, want = grads(found, ids), grads(expected, ids)
        assert got.keys() == want.keys()
        assert all(relative(got[name], want[name]) < RELATIVE for name in want)
        assert all(payload.masked_rows is not None for payload in taken)
        assert (len(taken) > 20) == (mask != "off")
        assert bool(taken) == (mask != "off")
