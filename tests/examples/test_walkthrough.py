"""Runs examples/two_terminals.md block by block: each `sh` block is run exactly as printed.

The first word after `sh` names the kind of block. Blocks of the kinds `setup` and `two-machines` are not run here. A
block `serve` runs until the end of the test. A block `fails` must fail with the one line that the page shows. All other
blocks must succeed.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.repository import ROOT

PAGE = ROOT / "examples" / "two_terminals.md"
BLOCK = re.compile(r"^```sh *([a-z-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REVOKED = "tenant: the provider has revoked this identity: ask its operator for a new one"


def bash(script: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=waiting.limit_s, env=env, cwd=cwd)


@contextmanager
def serving(script: str, env: dict[str, str], cwd: Path) -> Iterator[str]:
    command = ["bash", "-c", f"exec {script}"]  # with exec, the signal reaches the provider and not a shell
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=cwd)
    try:
        assert process.stdout is not None
        word, url = process.stdout.readline().split()
        assert word == "ready"
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=waiting.limit_s)
        finally:
            process.kill()
    assert process.returncode == 0


@pytest.mark.slow
def test_every_documented_command_runs(env: dict[str, str], workdir: Path) -> None:
    text = PAGE.read_text()
    assert REVOKED in " ".join(text.split())
    blocks = [(kind, body) for kind, body in BLOCK.findall(text) if kind not in ("setup", "two-machines")]
    (kind, serve), *rest = blocks
    assert (kind, len(rest)) == ("serve", 6)
    outputs = []
    with serving(serve, env, workdir) as url:
        for kind, body in rest:
            done = bash(body, env, workdir)
            outputs.append(done.stdout)
            if kind == "fails":
                assert (done.returncode, done.stderr.strip()) == (1, REVOKED)
            else:
                assert done.returncode == 0, f"{body}\n{done.stderr}"
        assert (workdir / "acme" / "endpoint").read_text().strip() == url
    enrolled, explained, trained, answered, revoked, refused = outputs
    assert f"endpoint {url} (that of the last serve)" in enrolled
    assert "active" in enrolled
    assert "decision Module-LWE" in explained
    assert f"every reply and the bundle are checked against {env['VERIFY']}" in explained
    assert "adapter adapters/harborlight\nloss " in trained
    assert answered
    assert "revoked" in revoked
    assert not refused.strip()
    assert (workdir / "adapters/harborlight/adapter_model.safetensors").is_file()
