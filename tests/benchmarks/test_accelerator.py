"""Tests the benchmark of accelerators without one: its code runs on the CPU with small shapes, and it measures nothing
without a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import accelerator
from benchmarks.accelerator import NOT_POSSIBLE, Setting, main, products, replica, run_part, sweep
from tests.support.waiting import SLOW_TIMEOUT_S
from wire.ring import product_triton

QUICK = Setting("cpu", True)


def run(*options: str) -> object:
    """Runs the command on the CPU with small shapes; returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["--device", "cpu", "--quick", *options])
    return caught.value.code


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


def test_products_are_compared() -> None:
    results = products.run(QUICK)
    assert results.pop("wrong numbers") == 0
    assert len(results) == 5
    for one in results.values():
        assert one["ring"]["ratio"] == pytest.approx(one["ring"]["ms"] / one["bf16"]["ms"])
        assert "bar" not in one["ring"], "the CPU meets no bar"


def test_a_wrong_product_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = products.kernels("cpu")["ring"]
    monkeypatch.setattr(products, "kernels", lambda device: {"ring": lambda rows, weight: right(rows, weight) + 1})
    assert run_part("products", Setting("cpu", True, tmp_path / "products.json")) == 1
    assert json.loads((tmp_path / "products.json").read_text())["results"]["wrong numbers"] > 0


def test_exact_products_wrap() -> None:
    rows = torch.tensor([[2**31 - 1, -(2**31), -1, 70_000]], dtype=torch.int32)
    weight = torch.tensor([[127, 1], [-127, 1], [-1, 1], [3, 1]], dtype=torch.int8)
    expected = (rows.long() @ weight.long()).to(torch.int32)
    assert torch.equal(products.exact_product(rows, weight), expected)


def test_the_replicas_replies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    results = replica.run(QUICK)
    assert results["wrong numbers"] == 0
    assert len(results) == 1 + len(replica.QUICK_CASES)
    assert all(one["rows/s"] > 0 for name, one in results.items() if name != "wrong numbers")


def test_block_sizes_are_changed_for_one_measurement_only() -> None:
    before = {form: dict(blocks) for form, blocks in product_triton.BLOCKS.items()}
    small = {form: dict(blocks) for form, blocks in product_triton.SMALL_BLOCKS.items()}
    for _, _, _, _, table, change in sweep.variants():
        with sweep.Changed(table, change):
            name, _, form = table.partition(":")
            blocks = getattr(product_triton, name.removesuffix(" only"))
            assert (blocks[form] if form else blocks).items() >= change.items()
            assert bool(product_triton.SMALL_BLOCKS) is (" only" not in name)
    assert before == product_triton.BLOCKS
    assert small == product_triton.SMALL_BLOCKS
    assert "need a GPU" in sweep.run(QUICK)["not measured"]
    assert "need a GPU" in sweep.compile_all(QUICK)["not measured"]


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("--parts", "products,decode", "--out", str(tmp_path / "out")) == 2
    assert "expected parts among products, models, replica, compile, sweep, got decode" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_part_that_takes_too_long_is_ended_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(accelerator.LIMITS_S, "products", 0.01)
    assert run("--parts", "products", "--out", str(tmp_path)) == 1
    assert "products: ended after its 0 s; products.json has what was measured by then" in capsys.readouterr().out
    assert run("--parts", "products,replica", "--out", str(tmp_path), "--limit-s", "0") == 1
    assert capsys.readouterr().out.count("not measured, since the time is up") == 2


@pytest.mark.slow
def test_the_whole_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # the limits are for a device; on a busy machine with two cores a part may take longer
    monkeypatch.setattr(accelerator, "LIMITS_S", dict.fromkeys(accelerator.LIMITS_S, SLOW_TIMEOUT_S))
    assert run("--out", str(tmp_path), "--limit-s", str(SLOW_TIMEOUT_S)) == 0
    assert capsys.readouterr().out.count(": ended, ") == len(accelerator.LIMITS_S)
    models = json.loads((tmp_path / "models.json").read_text())["results"]
    for name in ("one process, off", "one process, lattice, masks on the device"):
        assert models["tenant on the device"][name]["step"]["s"] > 0
