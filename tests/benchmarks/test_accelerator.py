"""Tests the benchmark of accelerators without one: its code runs on the CPU with small shapes, and it measures nothing
without a device."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import accelerator
from benchmarks.accelerator import NOT_POSSIBLE, Setting, main, products, replica

QUICK = Setting("cpu", True)


def test_without_a_device_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == NOT_POSSIBLE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("there is no CUDA device here")


def test_products_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.run(QUICK)
    said = capsys.readouterr().out
    assert "wrong numbers: 0" in said
    assert "met" not in said, "the CPU meets no bar"


def test_a_wrong_product_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = products.kernels("cpu")["ring"]
    monkeypatch.setattr(products, "kernels", lambda device: {"ring": lambda rows, weight: right(rows, weight) + 1})
    assert not products.run(QUICK)
    assert "wrong numbers: 0" not in capsys.readouterr().out


def test_the_replicas_replies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert replica.run(QUICK)
    assert "the first rows of every reply are the CPU's: True" in capsys.readouterr().out


def test_no_part_begins_after_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerator.run_parts(Setting("cpu", True, time.monotonic() - accelerator.BUDGET_S)) == 0
    assert capsys.readouterr().out.count("not measured") == 4


@pytest.mark.slow
def test_the_whole_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--device", "cpu", "--quick"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "not measured" not in said
    assert "| lattice, masks ready |" in said
