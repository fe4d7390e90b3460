"""Tests the example scripts as a user starts them, with a tiny model. The demo itself takes minutes, and `make demo`
runs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig
from safetensors.torch import load_file

from tenant_sdk.testing import ScriptedProvider
from tests.support.repository import ROOT
from tests.support.spies import before_requests

pytestmark = pytest.mark.slow


def run(script: str, *arguments: object, env: dict[str, str], cwd: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "options"),
    [("finetune.py", ["--verify", "TINY"]), ("stock_trainer.py", ["--mask", "off"])],  # one of them by the default mask
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_script_trains_an_adapter(
    script: str, options: list[str], tiny_chat: Path, env: dict[str, str], workdir: Path
) -> None:
    options = [str(tiny_chat) if word == "TINY" else word for word in options]
    out = run(
        script, "--url", f"inproc:{tiny_chat}", "--max-steps", 2, "--output", "adapter", *options, env=env, cwd=workdir
    )
    assert ("decision Module-LWE" in out) == (script == "finetune.py")
    assert "adapter adapter: loss " in out
    assert PeftConfig.from_pretrained(str(workdir / "adapter")).r == 16
    tensors = load_file(workdir / "adapter" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name)  # zero before training


def test_the_two_sides_of_one_host(tiny_chat: Path, env: dict[str, str], workdir: Path) -> None:
    out = run("ipc.py", "--model", tiny_chat, "--output", "adapter", env=env, cwd=workdir)
    assert out.startswith("connected to ipc: ")
    assert "adapter adapter: loss " in out
    assert (workdir / "adapter" / "adapter_model.safetensors").is_file()


def test_a_script_that_fails_prints_one_line(env: dict[str, str], workdir: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/finetune.py"), "--url", "inproc:/no/such/folder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=workdir)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.startswith("finetune.py: cannot find the model")) == (1, True), line


@pytest.mark.parametrize("script", ["finetune.py", "stock_trainer.py", "demo.py", "ipc.py"])
def test_a_script_is_tuned_before_torch_is_imported(script: str) -> None:
    text = (ROOT / "examples" / script).read_text()
    tuned = text.index("tenant_sdk.tune()")
    others = [text.find(f"from {other} import") for other in ("torch", "peft", "transformers")]
    assert any(place > 0 for place in others)
    assert all(tuned < place for place in others if place > 0)


def test_the_demo_shows_the_numbers_that_a_client_without_a_mask_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEILBASE_DEMO_DIR", str(tmp_path))
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    sent: list[Any] = []
    with ScriptedProvider() as provider, provider.client(mask="off") as client:
        demo.keep_unmasked(client, "who?")
        assert provider.calls == []
        before_requests(monkeypatch, lambda call, payload: sent.append(payload.rows(call)))
        client.generate("who?", max_new_tokens=1)
    assert json.loads((tmp_path / "unmasked.json").read_text()) == sent[0][:2, :6].tolist()
