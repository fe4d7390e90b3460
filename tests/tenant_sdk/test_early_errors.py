"""Tests that the commands tell a mistake in one line before torch is loaded, which takes seconds, each in a process of
its own. tests/runtime/test_early_errors.py has every option of every command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from tests.support.providers import serving

CODE = """
import sys
from tenant_sdk import cli
sys.argv = ["tenant", *{words!r}]
try:
    cli.main()
except SystemExit as ended:
    assert ended.code == 1, ended.code
assert not {heavy!r} & set(sys.modules)
"""
HEAVY = {"torch", "transformers", "grpc"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a working folder with rows, with rows that have no known columns, and with an adapter."""
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n"))
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"x": 1}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rank.yaml").write_text("peft_config: {rank: 8}")
    (tmp_path / "zero.yaml").write_text("peft_config: {r: 0}")
    (tmp_path / "adapters" / "there").mkdir(parents=True)
    (tmp_path / "adapters" / "there" / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """Returns a port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def told(folder: Path, command: str, url: str = "", heavy: set[str] = HEAVY, **variables: str) -> str:
    """Runs a command of `tenant`, by default against a model that is there, and returns the line that it ends with."""
    words = [*command.split(), *([] if "--url" in command else ["--url", url or f"inproc:{folder}"])]
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(words=words, heavy=heavy)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **variables},
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("finetune nowhere.jsonl --output new", "there is no file nowhere.jsonl"),
        ("finetune wrong.jsonl --output new", "wrong.jsonl, line 1: "),
        ("finetune rows.jsonl --eval-data nowhere.csv --output new", "there is no file nowhere.csv"),
        ("finetune rows.jsonl --output adapters/there", "adapters/there holds an adapter already"),
        ("finetune rows.jsonl --output new --max-steps 0", "max_steps must be positive, got 0"),
        ("finetune rows.jsonl --output new --rank 0", "rank must be positive, got 0"),
        ("finetune rows.jsonl --output new --max-length -1", "max_length must be positive, got -1"),
        ("finetune rows.jsonl --output new --memory-budget-mb -1", "memory_budget_mb must be a finite number from 0"),
        ("finetune rows.jsonl --output new --config zero.yaml", "r of peft_config must be positive, got 0"),
        ("generate hi --max-new-tokens 0", "max_new_tokens must be a positive whole number, got 0"),
        ("chat --max-new-tokens -1", "max_new_tokens must be a positive whole number, got -1"),
        ("finetune rows.jsonl --output new --mask latice", "latice"),
        ("finetune rows.jsonl --output new --config rank.yaml", "peft_config: 'rank' is no option: the nearest is r"),
        (
            "finetune rows.jsonl --output new --eval-data 0.5 --keep-best --url grpc://127.0.0.1:1",
            "keep_best lets losses decide",
        ),
        (
            "generate who? --adapter adapters/ther",
            "there is no adapter folder adapters/ther: did you mean adapters/there?",
        ),
        ("generate who? --verify nowhere", "cannot find the checkpoint 'nowhere'"),
        ("serve --adapters nowhere --unverified", "--adapters: nowhere is not a folder"),
        ("serve --unverified --port 0 --device-slots 3", "--device-slots has no effect without adapters"),
        ("serve --adapters adapters", "replies of the provider are not verified"),
    ],
)
def test_a_mistake_is_told_before_torch_is_loaded(folder: Path, command: str, expected: str) -> None:
    assert expected in told(folder, command)


@pytest.fixture(scope="module")
def url(chat_served_model: ServedModel) -> Iterator[str]:
    """Provides the URL of a provider that answers, of a model with two blocks."""
    with serving(chat_served_model) as server:
        yield f"grpc://127.0.0.1:{server.port}"


KEEPS = "explain --verify trusted --keep"
SENDS = "finetune rows.jsonl --output new"


@pytest.mark.parametrize(
    ("command", "peft_config", "expected"),
    [
        (f"{KEEPS} atention", "", "but no layer of this model is called so: the nearest is attention"),
        (f"{KEEPS} lower:7", "", "this model has 2 blocks"),
        (SENDS, "target_modules: [q_prj]", "but no module of the model is called so: the nearest is q_proj"),
        (SENDS, "target_modules: q_proj", "write a list, [q_proj]"),
        (SENDS, "target_modules: [q_proj], layers_to_transform: [40]", "block 40, but the model has blocks 0 to 1"),
        (f"{SENDS} --epochs 2 --cache-frozen-prefix", "target_modules: [q_proj]", "adapter on the lowest block"),
        ("plan rows.jsonl", "target_modules: [q_prj]", "the nearest is q_proj"),
    ],
)
def test_what_the_model_does_not_have_is_told_before_torch_is_loaded(
    folder: Path, url: str, command: str, peft_config: str, expected: str
) -> None:
    (folder / "trusted").mkdir()
    (folder / "trusted" / "config.json").write_text("{}")
    (folder / "trusted" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    if peft_config:
        (folder / "adapter.yaml").write_text(f"peft_config: {{{peft_config}}}")
        command += " --config adapter.yaml"
    assert expected in told(folder, command, url, HEAVY - {"grpc"})


def test_a_port_in_use_is_told_before_torch_is_loaded(folder: Path, taken: int) -> None:
    line = told(folder, f"serve --adapters adapters --unverified --port {taken}")
    assert f"port {taken} cannot be listened to: Address already in use" in line


def test_a_revoked_identity_is_told_before_torch_is_loaded(folder: Path, chat_served_model: ServedModel) -> None:
    state = StateDir(folder / "state")
    with serving(chat_served_model, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", folder / "acme", url)
        revoke(state, "acme")
        line = told(folder, "generate who? --identity acme", url, HEAVY - {"grpc"})
    assert line == "tenant: the provider has revoked this identity: ask its operator for a new one"


def test_a_socket_without_a_provider_is_told_before_torch_is_loaded(folder: Path) -> None:
    enroll(StateDir(folder / "state"), "acme", folder / "acme", "grpcs://127.0.0.1:1")
    (folder / "sockets").mkdir(mode=0o711)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "sockets" / "veilbase.sock"))
    line = told(folder, "explain --identity acme", f"ipc:{folder / 'sockets'}")
    assert "its socket is left from one that has ended; start it again" in line


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("VEILBASE_CACHE", "/proc/x", "the cache '/proc/x' cannot be made: nothing can be made in '/proc'"),
        ("VEILBASE_CACHE", "rows.jsonl/x", "rows.jsonl' is no folder"),
        ("VEILBASE_KERNELS", "avx3", "is none or avx2, or left out, got 'avx3'"),
        ("VEILBASE_BUSY_POLL_MS", "x", "must be a number of milliseconds from 0 to 10, got 'x'"),
    ],
)
def test_a_wrong_variable_is_named_before_torch_is_loaded(folder: Path, name: str, value: str, expected: str) -> None:
    line = told(folder, "generate hi", **{name: value})
    assert expected in line
    assert name in line


@pytest.mark.parametrize("command", ["explain --verify owner/model", "explain --tokenizer owner/model@main"])
def test_a_hub_that_cannot_be_reached_is_told_before_torch_is_loaded(folder: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    variables = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(folder),
        "no_proxy": "*",
    }
    line = told(folder, command, **variables)
    assert "is not cached here, HF_HUB_OFFLINE=0 allows its download, and the hub cannot be reached: check the" in line
