"""Tests what is packed for a GPU machine without a network. Nothing is downloaded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import carry
from tests.support.repository import ROOT


def test_everything_that_is_needed_is_packed_but_what_the_machine_has() -> None:
    whole = carry.needed({})
    assert {"cryptography", "cffi", "pydantic", "pydantic-core", "transformers", "grpcio", "pytest"} <= whole.keys()
    assert not {"veilbase", "torch", "numpy", "triton"} & whole.keys()
    has = {"transformers": whole["transformers"], "cryptography": "1.0"}
    less = carry.needed(has)
    assert "transformers" not in less, "the machine's version fits"
    assert "cryptography" in less, "the machine's version is too old"


def test_a_list_of_packages_is_read() -> None:
    assert carry.read_freeze("Jinja2==3.1.6\npydantic_core==2.50.4\n-e git+x\n") == {
        "jinja2": "3.1.6",
        "pydantic-core": "2.50.4",
    }


def test_the_versions_are_those_of_the_constraints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[object]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    carry.pack(tmp_path, "3.12", {})
    ((*_, last),) = commands
    pinned = carry.read_freeze((ROOT / "constraints.txt").read_text())
    wanted = [str(word) for word in commands[0] if "==" in str(word)]
    assert str(last) == wanted[-1]
    for name, version in carry.read_freeze("\n".join(wanted)).items():
        if name != "setuptools":  # comes with the environment
            assert pinned[name] == version
    assert (tmp_path / "run.sh").read_text().startswith("#!/bin/bash")
    assert subprocess.check_call(["bash", "-n", str(tmp_path / "run.sh")]) == 0


def test_the_tests_of_the_other_machine_are_there() -> None:
    """run.sh names folders and files of tests; pytest stops at a name that does not exist."""
    named = [word for word in carry.RUN.split() if word.startswith("tests/")]
    assert named
    assert all((ROOT / name).exists() for name in named)
    marked = {
        file.relative_to(ROOT)
        for file in set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
        if "mark.gpu" in file.read_text() or "cpu_and(" in file.read_text()
    }
    left_out = {str(file) for file in marked if not any(file.is_relative_to(name) for name in named)}
    assert not left_out, "tests marked gpu that run.sh does not run"
