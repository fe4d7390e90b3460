"""Tests that the commands tell a mistake in one line before torch is loaded, which takes seconds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = """
import sys
from tenant_sdk import cli
sys.argv = ["tenant", *{words!r}]
try:
    cli.main()
except SystemExit as ended:
    assert ended.code == 1, ended.code
assert not {{"torch", "transformers", "grpc"}} & set(sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a working folder with rows, with rows that have no known columns, and with an adapter."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"x": 1}))
    (tmp_path / "adapters" / "there").mkdir(parents=True)
    (tmp_path / "adapters" / "there" / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """Returns a port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def told(folder: Path, command: str) -> str:
    """Runs a command of `tenant` against a model that is there, and returns the line that it ends with."""
    words = [*command.split(), "--url", f"inproc:{folder}"]
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(words=words)], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("finetune nowhere.jsonl --output new", "nowhere.jsonl: expected a readable JSONL file: No such file"),
        ("finetune wrong.jsonl --output new", "wrong.jsonl, line 1: "),
        ("finetune rows.jsonl --eval-data nowhere.csv --output new", "nowhere.csv: "),
        ("finetune rows.jsonl --output adapters/there", "adapters/there holds an adapter already"),
        ("finetune rows.jsonl --output new --max-steps 0", "max_steps must be positive, got 0"),
        ("finetune rows.jsonl --output new --mask latice", "latice"),
        ("generate who? --verify nowhere", "cannot find the checkpoint 'nowhere'"),
        ("serve --adapters nowhere --unverified", "--adapters: nowhere is not a folder"),
        ("serve --unverified --port 0 --device-slots 3", "--device-slots has no effect without adapters"),
        ("serve --adapters adapters", "replies of the provider are not verified"),
    ],
)
def test_a_mistake_is_told_before_torch_is_loaded(folder: Path, command: str, expected: str) -> None:
    assert expected in told(folder, command)


def test_a_port_in_use_is_told_before_torch_is_loaded(folder: Path, taken: int) -> None:
    line = told(folder, f"serve --adapters adapters --unverified --port {taken}")
    assert f"port {taken} cannot be listened to: Address already in use" in line
