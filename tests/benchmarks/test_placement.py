"""Tests the benchmark of placements: its tables and plots with made-up results, and one part with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.placement import plots, report
from benchmarks.placement.model import LORAS
from benchmarks.placement.worker import Job
from tests.support.repository import ROOT
from tests.support.waiting import SLOW_TIMEOUT_S

HEAD = {"model": "tiny", "transport": "ipc", "date": "2026-01-02", "processor": "P", "cores": 2, "instructions": [],
        "took_s": 3}  # fmt: skip


def row(side: str, clients: int, step_s: float, clients_mb: float, provider_mb: float = 0.0) -> dict[str, object]:
    return {"side": side, "mask": "off", "clients": clients, "step_s": step_s, "tokens_per_s": 128 * clients / step_s,
            "clients_mb": clients_mb, "provider_mb": provider_mb, "clients_cpu_s": 1.0, "provider_cpu_s": 0.5,
            "others_share": 0.0}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [row("provider", 1, 4.0, 1000, 1500), row("local", 1, 2.0, 3000),
            row("provider", 2, 6.0, 2000, 1500), row("local", 2, 4.0, 6000)]  # fmt: skip
    (tmp_path / "figure10.json").write_text(json.dumps(HEAD | {"rows": rows}))
    return tmp_path


def test_a_table_pairs_clients_with_as_many_local_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.show(report.read(folder))
    out = capsys.readouterr().out
    assert "| 1 | 1,500 | 1,000 | 3,000 | 0.83 |" in out
    assert "| 2 | 1,500 | 2,000 | 6,000 | 0.58 |" in out
    assert "| 2 | 6.00 | 4.00 | 1.50 | 42.7 | 64.0 | 0.67 | 1.00 + 0.50 | 1.00 | 0.67 |" in out
    # 6,000 MB hold the provider's 1,500 and 4.5 clients of 1,000 each
    assert "holds 4.5 clients and the provider: 2.2 times as many" in out


def test_own_memory_is_compared_within_its_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = row("provider", 1, 5.0, 4000, 1500) | {"mask": "lattice", "clients_own_mb": 1200}
    rows = [masked, row("local", 1, 2.5, 3100) | {"clients_own_mb": 3000}]
    (folder / "figure10-lattice.json").write_text(json.dumps(HEAD | {"rows": rows}))
    report.show(report.read(folder))
    out = capsys.readouterr().out
    assert "| 1 | 1,200 | 3,000 | 0.40 |" in out
    assert "| 1 | 1,500 | 4,000 | 3,100 | 1.77 |" in out
    assert "| 1 | 1,500 | 1,000 | 3,000 | 0.83 |" in out


def test_plots_are_the_same_for_the_same_results(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report.read(folder)
    plots.draw(found, folder)
    first = (folder / "scaling.svg").read_bytes()
    plots.draw(found, folder)
    assert (folder / "scaling.svg").read_bytes() == first
    assert b"Figure 10" in first
    assert not (folder / "places.svg").exists()


@pytest.mark.parametrize("lora", LORAS.values(), ids=list(LORAS))
def test_a_job_is_the_same_in_its_process(lora: object) -> None:
    job = Job("/model", "ipc:/here", "/acme", rank=lora.rank, targets=lora.targets, core=1)  # type: ignore[attr-defined]
    assert Job.from_argument(job.as_argument()) == job


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Provides a folder whose path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(SLOW_TIMEOUT_S)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="client and provider need a core each")
def test_a_part_runs_once(tmp_path: Path, short_folder: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks.placement", "--model", "tiny", "--steps", "1", "--only", "figure18"]
    out = tmp_path / "out"

    def run() -> str:
        done = subprocess.run(
            [*command, "--out", str(out), "--scratch", str(short_folder)],
            capture_output=True, text=True, timeout=SLOW_TIMEOUT_S, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "figure 18" in run()
    rows = json.loads((out / "figure18.json").read_text())["rows"]
    assert [(one["side"], one["slow"]) for one in rows] == [
        ("provider", "none"), ("provider", "client"), ("provider", "provider"), ("local", "local"), ("local", "none"),
    ]  # fmt: skip
    assert all(one["step_s"] > 0 and one["clients_mb"] > 0 for one in rows)
    assert [one["loop_share"] > 0 for one in rows] == [False, True, True, True, False]
    assert not list(short_folder.iterdir()), "neither model nor state is left"
    assert "has results already" in run()
