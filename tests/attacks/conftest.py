"""Holds fixtures that several tests of the attacks use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from attacks.report import command_line
from attacks.victim import harness, tenant
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.operations.recording import Recorder
from tests.support.providers import serving


@pytest.fixture
def no_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the positive controls out of a run, since they would take most of the run's time.

    Instead `test_closed_form.py` runs each control by itself, and `test_quick.py::test_the_quick_profile` runs two
    beside a whole run.
    """

    @contextlib.contextmanager
    def none(names: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(recv=list)

    monkeypatch.setattr(command_line, "_controls_beside", none)


@dataclass
class Victim:
    """Says how the victim of the fixture `in_process` is changed.

    Attributes:
        change: changes the code that the victim runs, for as long as it runs.
    """

    change: Callable[[pytest.MonkeyPatch], None] = lambda patch: None


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Victim:
    """Runs the victim and its recording provider in this process, because their processes take longer to start than to
    do their work. `test_quick.py::test_the_quick_profile` starts them as a user does."""
    victim = Victim()

    def record(folder: Path, seen: Path, model: str, job: tenant.Job, masks: list[tenant.Run], *_: object) -> None:
        served = serve_model(load(resolve(model)), recording=True)
        served_model = ServedModel(served, Recorder(seen, served.manifest))
        state = StateDir(folder / "state")
        runs = [run.model_copy(update={"identity": folder / f"identity-{run.label}"}) for run in masks]
        with serving(served_model, state=state) as server, monkeypatch.context() as patch:
            url = f"grpcs://127.0.0.1:{server.port}"
            for run in runs:
                enroll(state, run.label, run.identity, url)
            victim.change(patch)
            tenant.main(job, lambda: tenant.Site(url=url, runs=runs))
        served_model.close()

    monkeypatch.setattr(harness, "record", record)
    return victim
