"""Tests the `provider` command in an operating system process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from provider.cli import app
from provider.config import ProviderSettings
from provider.identity.authority import StateDir, UnknownTenant, current_time
from provider.identity.registry import enroll
from provider.operations.usage import FILE_NAME
from provider.serve import serve
from tests.support import waiting
from tests.support.commands import Serving, one_line_error, run
from tests.support.ring_products import CALL
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, NotPermitted, VeilbaseError
from wire.payload import RowsPayload
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity


@pytest.fixture
def serving(model: Path, tmp_path: Path) -> Iterator[Serving]:
    options = "--tls", "--model", model, "--port", 0, "--state", tmp_path / "state", "--record", tmp_path / "seen"
    with Serving(*options) as one:
        yield one


def test_serve_enroll_use_revoke_stop(serving: Serving, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert serving.url.startswith("grpcs://127.0.0.1:")
    done = run("enroll", "acme", "--out", tmp_path / "acme", "--state", state)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "acme" / "endpoint").read_text().strip() == serving.url
    assert f"endpoint {serving.url} (that of the last serve)" in done.stdout

    connection = GrpcConnection(serving.url, TlsIdentity.read(tmp_path / "acme"))
    manifest = connection.manifest()
    assert manifest.recording
    assert manifest.model_id == "tiny"
    reply = connection.submit(CALL, RowsPayload(torch.ones(20, 32, dtype=torch.int32)), 64).result()
    assert reply.shape == (20, 64)
    (line,) = [json.loads(line) for line in (tmp_path / "seen" / "index.jsonl").read_text().splitlines()]
    assert (line["tenant"], line["layer"], line["rows"]) == ("acme", 0, 20)

    assert "acme" in run("tenants", "--state", state).stdout
    assert run("revoke", "acme", "--state", state).returncode == 0
    with pytest.raises(NotPermitted):
        connection.submit(CALL, RowsPayload(torch.ones(20, 32, dtype=torch.int32)), 64).result()
    assert "revoked" in run("tenants", "--state", state).stdout
    connection.close()

    code, out, err = serving.stop()
    assert (code, out) == (0, "")
    assert err.count("RECORDING") == 1
    assert "Traceback" not in err
    assert not list(state.glob("bundle*"))


@pytest.mark.slow
def test_without_tls_the_tenant_is_local_and_sigint_stops(model: Path, tmp_path: Path) -> None:
    serving = Serving("--model", model, "--port", 0, "--state", tmp_path, "--weights", "native")
    assert serving.url.startswith("grpc://127.0.0.1:")
    connection = GrpcConnection(serving.url)
    assert connection.manifest().weights == "native"
    assert connection.submit(CALL, RowsPayload(torch.ones(1, 32, dtype=torch.int32)), 64).result().shape == (1, 64)
    code, _, err = serving.stop(signal.SIGINT)
    assert code == 0, err
    with pytest.raises(VeilbaseError):
        connection.submit(CALL, RowsPayload(torch.ones(1, 32, dtype=torch.int32)), 64).result()
    connection.close()


@pytest.mark.slow
def test_base_layers_choose_what_is_served(model: Path, tmp_path: Path) -> None:
    serving = Serving("--model", model, "--port", 0, "--state", tmp_path, "--base-layers", "*.mlp.*,!*.down_proj")
    connection = GrpcConnection(serving.url)
    names = [layer.name for group in connection.manifest().groups for layer in group.layers]
    connection.close()
    assert names == [f"model.layers.{index}.mlp.{kind}_proj" for index in (0, 1) for kind in ("gate", "up")]
    assert serving.stop()[0] == 0


@pytest.mark.slow
def test_a_port_in_use_is_one_line(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in one_line_error(
            run("serve", "--model", model, "--port", port, "--state", tmp_path)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "--model", "no-such/model-anywhere", "--port", "0"], "cannot find the model"),
        (["serve", "--model", "/no/such/folder", "--port", "0"], "cannot find the model"),
        (["serve", "--host", "0.0.0.0"], "add --tls"),  # noqa: S104 - refused
        (["serve", "--port", "99999"], "port"),
        (["serve", "--config", "/no/such/file.yaml"], "found none"),
        (["serve", "--record-limit", "lots"], "record_limit"),
        (["enroll", "Not A Name", "--out", "OUT"], "tenant name"),
        (["enroll", "acme", "--out", "OUT", "--endpoint", "http://x"], "grpcs://"),
        (["revoke", "nobody"], "provider"),
        (["tenants"], "found no provider here"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], text: str) -> None:
    arguments = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    assert text in one_line_error(run(*arguments, "--state", tmp_path / "state"))


def test_a_misspelt_variable_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_PROVIDER_PROT", "1")
    for command in (["serve", "--tls"], ["tenants"]):
        line = one_line_error(run(*command, "--state", tmp_path / "state"))
        assert "'VEILBASE_PROVIDER_PROT' is no setting" in line
        assert "PORT" in line
    assert not (tmp_path / "state").exists()


def test_enroll_says_which_endpoint_it_wrote(tmp_path: Path) -> None:
    given = "grpcs://provider.example:1"
    for name, arguments, url, whence in (
        ("acme", [], "grpcs://127.0.0.1:8443", "a guess"),
        ("globex", ["--endpoint", given], given, "as given"),
    ):
        folder = tmp_path / name
        done = run("enroll", name, "--out", folder, "--state", tmp_path / "state", *arguments)
        line = done.stdout.splitlines()[1]
        assert line.startswith(f"endpoint {url} ({whence}")
        assert line.endswith(f"edit {folder / 'endpoint'}")
        assert (folder / "endpoint").read_text() == f"{url}\n"


def test_usage_says_that_there_is_none_yet_and_of_whom(tmp_path: Path) -> None:
    runner, state = CliRunner(), ["--state", str(tmp_path / "state")]
    assert runner.invoke(app, ["enroll", "acme", "--out", str(tmp_path / "acme"), *state]).exit_code == 0
    for words, whose in (([], "no requests are"), (["acme"], "no requests of acme are")):
        for shown, text in (([], ""), (["--json"], "{}\n")):
            done = runner.invoke(app, ["usage", *words, *shown, *state])
            assert done.stdout == text
            assert whose in done.stderr
    with pytest.raises(UnknownTenant, match="did you mean acme"):
        runner.invoke(app, ["usage", "acm", *state], catch_exceptions=False)
    (tmp_path / "state" / FILE_NAME).write_text(
        '{"tenants": {"acme": {"requests": {"decode": 1}, "bytes_up": 3}, "globex": {}}}'
    )
    done = runner.invoke(app, ["usage", "acme", "--json", *state])
    assert json.loads(done.stdout)["acme"]["bytes_up"] == 3
    assert "globex" not in done.stdout
    assert "counted by an earlier release" in done.stderr


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--port", "many"], ["enroll"]], ids=str)
def test_what_typer_refuses_is_usage_and_exit_code_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "no-such-model"], "cannot find the model 'no-such-model'"),
        (["--model", "no-such/model"], "which the commands set by default, forbids downloads"),
        (["--port", "TAKEN"], "cannot listen on 127.0.0.1:TAKEN: is it in use"),
        (["--tls", "--tensor-port", "TAKEN"], "port TAKEN, for tensors: is it in use"),
        (["--metrics-port", "TAKEN"], "cannot listen on 127.0.0.1:TAKEN for metrics"),
        (["--health-port", "TAKEN"], "cannot listen on 127.0.0.1:TAKEN for health"),
        (["--host", "192.0.2.1", "--tls"], "not an address of this machine"),
    ],
    ids=str,
)
def test_a_mistake_of_serve_is_told_before_torch_is_loaded(
    words: list[str], expected: str, model: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = str(listening.getsockname()[1])
        rest = [*(["--port", "0"] if "--port" not in words else []), "--state", str(tmp_path)]
        rest += [] if "--model" in words else ["--model", str(model)]
        code = f"""
import os, sys
os.environ.pop("HF_HUB_OFFLINE", None)
from provider import cli
sys.argv = ["provider", "serve", *{[word.replace("TAKEN", taken) for word in words]}, *{rest}]
try:
    cli.main()
except SystemExit as ended:
    assert ended.code == 1
assert not {{'torch', 'transformers'}} & set(sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert expected.replace("TAKEN", taken) in line


@pytest.mark.parametrize("port", [18443, 0])
def test_a_tenant_that_is_enrolled_while_the_provider_starts_gets_its_endpoint(
    port: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Server` is made after torch was imported, and before the model is loaded: the URL is written before that."""

    def stopped(*_: object) -> None:
        raise ConfigurationError("as far as needed")

    monkeypatch.setattr("provider.net.server.Server", stopped)
    # 18443 may be taken on this machine, and the others would change this process
    for name in ("check_ports", "share_one_heap", "raise_file_limit", "refuse_tls_1_2", "signal.signal"):
        monkeypatch.setattr(f"provider.serve.{name}", lambda *_: None)
    state = tmp_path / "state"
    with pytest.raises(ConfigurationError, match="as far as needed"):
        serve(ProviderSettings(model=str(model), tls=True, port=port, state=state))
    arguments = ["enroll", "acme", "--out", str(tmp_path / "acme"), "--state", str(state)]
    done = CliRunner().invoke(app, arguments)
    if port:
        assert (tmp_path / "acme" / "endpoint").read_text() == f"grpcs://127.0.0.1:{port}\n"
    else:
        assert isinstance(done.exception, ConfigurationError)
        assert "has no port yet" in str(done.exception)
        assert not (tmp_path / "acme").exists()


def test_the_registrys_commands_do_not_wait_for_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds, and only commands that compute need it."""
    state = ["--state", str(tmp_path / "state")]
    commands = [["enroll", "acme", "--out", str(tmp_path / "acme")], ["tenants"], ["usage"], *[["revoke", "acme"]] * 2]
    code = f"""
import sys
from provider.cli import app
for command in {commands}:
    app([*command, *{state}], standalone_mode=False)
assert not {{'torch', 'grpc', 'transformers'}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first == "revoked 1 certificate of acme"
    assert second.startswith("acme is already revoked, since ")


def test_an_expired_certificate_is_not_called_revoked(tmp_path: Path) -> None:
    long_ago = current_time() - timedelta(days=30)
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", "grpcs://127.0.0.1:1", days=1, now=long_ago)
    done = CliRunner().invoke(app, ["revoke", "acme", "--state", str(tmp_path / "state")])
    until = long_ago + timedelta(days=1)
    assert done.stdout == f"nothing to revoke: the last certificate of acme expired on {until:%Y-%m-%d}\n"


@pytest.mark.slow
def test_stopping_while_it_loads(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "provider", "serve", "--tls", "--model", str(model), "--port", "0"]
    env = {**os.environ, "VEILBASE_PROVIDER_STATE": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    process.terminate()
    _, err = process.communicate(timeout=waiting.limit_s)
    assert process.returncode == 0, err
    assert "Traceback" not in err
