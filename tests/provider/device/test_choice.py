"""Tests which device computes, and the one line that says why an accelerator cannot be used. CUDA is a stand-in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from provider.device import choice
from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError
from wire.manifest import GroupInfo

GB = 10**9
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Provides a function that makes torch see another machine."""

    def be(
        count: int = 2,
        free: int = 40 * GB,
        is_built: bool = True,
        init: str = "",
        is_exact: bool = True,
        fault: str = "",
    ) -> None:
        def started() -> None:
            if init:
                raise RuntimeError(init)

        def memory(device: torch.device) -> tuple[int, int]:
            if fault:
                raise RuntimeError(fault)
            return free, 80 * GB

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "init", started)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Stand-in")
        monkeypatch.setattr(choice, "is_exact_on", lambda device: is_exact)

    return be


@pytest.mark.parametrize(
    ("wanted", "number", "expected"),
    [
        ("auto", 0, 0),
        ("cuda", 0, 0),
        ("cuda", 1, 1),
        ("cuda", 5, 1),
        ("auto", 3, 1),
        ("cuda:1", 0, 1),
        ("cuda:0", 3, 0),
    ],
)
def test_process_i_gets_device_i_mod_n(machine: Machine, wanted: str, number: int, expected: int) -> None:
    machine()
    assert choice.choose(wanted, number) == torch.device("cuda", expected)


def test_cpu_asks_nothing_of_cuda(machine: Machine) -> None:
    machine(init="must not be asked")
    assert choice.choose("cpu") is None


OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update\nyour GPU driver by"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"is_built": False}, "this build of torch has no CUDA (a GPU would need torch's CUDA build)"),
    ({"init": OLD}, "the NVIDIA driver is too old for CUDA"),
    ({"init": "Found no NVIDIA driver on your system.\nPlease check"}, "this machine has no NVIDIA driver"),
    ({"init": "CUDA unknown error\nmore"}, "CUDA cannot be started: CUDA unknown error"),
    ({"count": 0}, "no CUDA device is visible to this process"),
    ({"free": GB // 2}, "cuda:0 has 0.5 of 80.0 GB free, since other processes hold the rest"),
    ({"fault": "CUDA error: out of memory\nCompile with"}, "cuda:0 cannot be used: CUDA error: out of memory"),
    ({"is_exact": False}, "cuda:0 failed the self-test of its int8 products"),
]


@pytest.mark.parametrize(("what", "line"), BAD)
def test_a_device_that_cannot_be_used_is_one_line(machine: Machine, what: dict[str, Any], line: str) -> None:
    machine(**what)
    with pytest.raises(ConfigurationError) as caught:
        choice.choose("cuda")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("what", "line"), BAD)
def test_auto_computes_on_the_cpu_and_says_why(
    machine: Machine, what: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine(**what)
    with caplog.at_level(logging.INFO):
        assert choice.choose("auto") is None
    (said,) = caplog.messages
    assert said.startswith(f"computing on the CPU; no GPU is used: {line}")


def test_no_such_device(machine: Machine) -> None:
    machine()
    with pytest.raises(ConfigurationError, match="no device cuda:2: this machine has 2, counted from 0"):
        choice.choose("cuda:2")


def test_weights_that_do_not_fit_say_how_many_layers_would(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels keep two copies of a weight, so each group of 500 MB needs 1 GB on the device, where half a GB is
    reserved. `auto` then computes on the CPU."""
    machine(free=2_000_000_000)
    groups = [_group(number, 25_000, 20_000) for number in range(2)]
    with pytest.raises(ConfigurationError, match="do not fit on cuda:0: 1 of 2 layers would") as caught:
        choice.choose("cuda:0", 0, groups)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.INFO):
        assert choice.choose("auto", 0, groups) is None
    assert caplog.messages == [f"computing on the CPU; no GPU is used: {caught.value}"]
    assert choice.choose("auto", 0, groups[:1]) == torch.device("cuda", 0)


def _group(number: int, d: int, m: int) -> ServedGroup:
    layer = {
        "name": f"layer{number}", "kind": "linear", "bias": False, "in_features": d, "out_features": m,
        "max_column_norm": 1.0, "max_row_norm": 1.0, "digest": "0" * 64,
    }  # fmt: skip
    info = GroupInfo.model_validate(
        {"id": number, "name": f"layer{number}", "layers": [layer], "in_features": d, "out_features": m,
         "max_column_norm": 1.0, "max_row_norm": 1.0, "digest": "0" * 64}
    )  # fmt: skip
    return ServedGroup(info, torch.empty(d, m, dtype=torch.int8), torch.empty(m), None, None)
