"""Tests `torchrun ... -m provider serve --parallel` with a real tenant and two real processes, and how these end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tenant_sdk import TenantClient
from tests.support.ranks import ROOT

pytestmark = pytest.mark.slow

END_S = 60.0


class Serving:
    """Runs torchrun with its two ranks."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        # With --standalone, torchrun picks free ports, which tests need. docs/placement.md says why providers are
        # started otherwise.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "provider", "serve", "--model", str(model), "--port", "0", "--threads", "1", *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready grpc://127.0.0.1:"), log.read_text()
        self.url = line.split()[1]
        self.ranks = self._children()

    def _children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(pid) for task in tasks for pid in task.read_text().split())

    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        for pid in self.ranks:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate(timeout=END_S)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(params=["tensor", "fsdp"])
def serving(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path) -> Iterator[Serving]:
    one = Serving(models["llama"], tmp_path / "log", "--parallel", request.param)
    yield one
    one.end()


def step(client: TenantClient) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the logits, and the gradients of an adapter whose B is not zero."""
    torch.manual_seed(3)
    model: Any = get_peft_model(
        client.load_model(),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False),
    )
    token_ids = torch.randint(3, 127, (2, 12), generator=torch.Generator().manual_seed(1))
    out = model(input_ids=token_ids, labels=token_ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_tenant_steps_and_sigterm_ends_all(serving: Serving, models: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"mask": "off", "arithmetic": "ring", "cache": tmp_path}
    with TenantClient(f"inproc:{models['llama']}", **options) as alone, TenantClient(serving.url, **options) as both:
        expected, grads = step(alone)
        logits, gradients = step(both)
    assert torch.equal(logits, expected)
    assert gradients.keys() == grads.keys()
    assert all(torch.equal(gradients[name], grads[name]) for name in grads)
    with TenantClient(serving.url, mask="lattice", cache=tmp_path) as masked:  # this mask needs hints
        close = step(masked)[0]
    assert float((close - expected).norm() / expected.norm()) < 1e-3

    assert len(serving.ranks) == 2
    assert all(is_running(pid) for pid in serving.ranks)
    serving.process.send_signal(signal.SIGTERM)
    serving.process.wait(timeout=END_S)
    assert not any(is_running(pid) for pid in serving.ranks)
    assert " ERROR " not in serving.log()  # a rank that lost another logs this; torchrun's own lines differ


def test_outside_torchrun_the_error_says_how_to_start() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "provider", "serve", "--parallel", "fsdp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "provider: --parallel fsdp is several processes: start it with "
        "torchrun --nproc-per-node 2 --master-port 29500 -m provider serve --parallel fsdp"
    ]
