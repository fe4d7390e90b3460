"""Tests the main job from a shell: a provider process, an enrolled tenant, a provider that is killed in the middle of a
step, and a resumed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tenant_sdk.testing import character_tokenizer
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import WAIT_S
from wire.errors import NotPermitted, TransportError
from wire.transport.grpc_connection import GrpcConnection


class Process:
    """Runs `provider serve --tls` in a process of its own."""

    def __init__(self, folder: Path, state: Path, port: int = 0) -> None:
        command = ["serve", "--tls", "--weights", "native", "--threads", "1", "--model", folder, "--state", state]
        self.handle = subprocess.Popen(
            [sys.executable, "-m", "provider", *map(str, command), "--port", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.handle.stdout is not None
        word, self.url = self.handle.stdout.readline().split()
        assert word == "ready"

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.handle.poll() is None:
            self.handle.send_signal(number)
        self.handle.communicate(timeout=WAIT_S)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    folder = make_chat_model(tmp_path / "model")
    running: list[Process] = []

    def start(port: int = 0) -> Process:
        running.append(Process(folder, tmp_path / "provider", port))
        return running[-1]

    yield start
    for process in running:
        process.end()


def provider(tmp_path: Path, *arguments: Any) -> None:
    command = [sys.executable, "-m", "provider", *map(str, arguments), "--state", str(tmp_path / "provider")]
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)


def test_kill_restart_resume_revoke(
    serve: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serve()
    identity, out = tmp_path / "acme", tmp_path / "adapters" / "support"
    provider(tmp_path, "enroll", "acme", "--out", identity)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = QUICK | {"max_steps": 12}
    with TenantClient(
        (identity / "endpoint").read_text().strip(), identity=identity, mask="off", arithmetic="float"
    ) as client:
        whole = client.finetune(data, lora(), tmp_path / "whole", **settings)
        # SIGKILL comes from another thread than the one that waits for a reply, once there is a checkpoint.
        submit, saved = GrpcConnection.submit, out.with_name(".support.checkpoints") / "checkpoint-4" / "complete"
        killer = threading.Thread(target=first.end, args=(signal.SIGKILL,))

        def kill_once(*arguments: Any) -> Any:
            if killer.ident is None and saved.exists():
                killer.start()
                killer.join(WAIT_S)
            return submit(*arguments)

        monkeypatch.setattr(GrpcConnection, "submit", kill_once)
        with pytest.raises(TransportError) as failure:
            client.finetune(data, lora(), out, **settings)
        assert "\n" not in str(failure.value)
        assert not killer.is_alive()
        assert not out.exists()
        serve(int(first.url.rpartition(":")[2]))
        result = client.finetune(data, lora(), out, **settings)
        assert result.resumed_from_step == 4
        assert result.losses == pytest.approx(whole.losses, rel=1e-5)
        answer = client.generate("who?", out, 12)
        stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), out).eval()
        tokenizer = character_tokenizer()
        prompt = [{"role": "user", "content": "who?"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        want = stock.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert answer == tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)
        provider(tmp_path, "revoke", "acme")
        with pytest.raises(NotPermitted):
            client.generate("who?", out, 12)
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
