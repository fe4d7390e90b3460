"""Tests `TenantClient("ipc:DIR")`: wrong settings are refused, and answers and training equal those over a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from provider.net.server import Server
from tenant_sdk import TenantClient, cli
from tenant_sdk.trust.pins import Pins
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, ProviderChanged, Unavailable, VeilbaseError, WrongPeer

PROMPT = "who?"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ipc")


@pytest.fixture(scope="module")
def server(root: Path, served_model: ServedModel) -> Iterator[Server]:
    state = StateDir(root / "state")
    enroll(state, "acme", root / "acme", "grpcs://127.0.0.1:1")
    made = Server("127.0.0.1", 0, state, ipc=root / "dir")
    made.start(served_model)
    yield made
    made.stop()


@pytest.mark.parametrize(("mask", "verified"), [("off", False), ("lattice", True)])
def test_answers_and_training_are_those_over_tcp(
    server: Server, root: Path, tmp_path: Path, chat_folder: Path, mask: str, verified: bool
) -> None:
    """Over the socket and over TCP, answers, losses and the number of bytes sent are the same. One case uses the
    lattice mask and checks every reply."""
    options = {"identity": root / "acme", "mask": mask, "progress": False}
    if verified:
        options |= {"verify": chat_folder, "mask_options": {"background": False}}
    found = []
    for url in (f"ipc:{root / 'dir'}", f"grpcs://127.0.0.1:{server.port}"):
        with TenantClient(url, cache=tmp_path / f"cache{len(found)}", **options) as client:
            answer = client.generate(PROMPT, max_new_tokens=8)
            result = client.finetune(ROWS[:2], lora(), tmp_path / f"adapter{len(found)}", **QUICK | {"max_steps": 2})
            found.append((answer, pytest.approx(result.losses, rel=1e-4), client.traffic.bytes_up))
    assert found[0][0] == found[1][0]
    assert found[0][2] == found[1][2]  # the same frames
    assert found[0][1] == found[1][1].expected


def test_a_folder_that_goes_with_the_provider_is_no_wrong_setting(
    root: Path, served_model: ServedModel, tmp_path: Path
) -> None:
    """systemd removes the folder of a service (RuntimeDirectory) when the service stops."""

    def start() -> Server:
        made = Server("127.0.0.1", 0, StateDir(root / "state"), ipc=folder)
        made.start(served_model)
        return made

    folder, identity = tmp_path / "run", tmp_path / "other"
    enroll(StateDir(root / "state"), "other", identity, "grpcs://127.0.0.1:1")
    first = start()
    with TenantClient(f"ipc:{folder}", identity=identity, mask="off", cache=tmp_path / "cache") as client:
        want = client.generate(PROMPT, max_new_tokens=4)
        first.stop()
        shutil.rmtree(folder)
        with pytest.raises(Unavailable, match="no folder"):
            client.reconnect()
        second = start()
        try:
            client.reconnect()
            assert client.generate(PROMPT, max_new_tokens=4) == want
        finally:
            second.stop()
    shutil.rmtree(folder)
    with pytest.raises(ConfigurationError, match="there is no folder"):
        TenantClient(f"ipc:{folder}", identity=identity, mask="off").connect()


def test_settings_that_cannot_be(root: Path, server: Server) -> None:
    identity, url = root / "acme", f"ipc:{root / 'dir'}"
    with pytest.raises(ConfigurationError, match="needs an identity"):
        TenantClient(url)
    for wrong in (-1, True, "root", 1 << 32):
        with pytest.raises(ConfigurationError, match="peer_uid is a user id"):
            TenantClient(url, identity=identity, peer_uid=wrong)
    with pytest.raises(ConfigurationError, match="peer_uid is for ipc: only"):
        TenantClient("grpcs://127.0.0.1:1", identity=identity, peer_uid=0)
    with pytest.raises(ConfigurationError, match="expected ipc:DIR"):
        TenantClient("ipc:", identity=identity)
    with (
        pytest.raises(VeilbaseError, match="belong to the provider's user"),
        TenantClient(url, identity=identity, peer_uid=os.geteuid() + 1),
    ):
        pass
    assert issubclass(WrongPeer, VeilbaseError)


def test_pins_are_kept_for_each_folder(server: Server, root: Path, tmp_path: Path) -> None:
    """What is pinned at first use is stored by the folder's URL. A provider that changes in the same folder is
    refused."""
    options = {"identity": root / "acme", "mask": "off", "progress": False, "cache": tmp_path / "cache"}
    with TenantClient(f"ipc:{root / 'dir'}", **options) as client:
        client.generate(PROMPT, max_new_tokens=1)
    text = (root / "acme" / "pins.json").read_text()
    assert f"ipc:{root / 'dir'}" in text
    pins = Pins(root / "acme")
    key = next(line for line in text.split('"') if line.endswith(f"at ipc:{root / 'dir'}"))
    with pytest.raises(ProviderChanged):
        pins.check(key, dict.fromkeys(("model", "tokenizer", "template", "config"), "0" * 64), ())


def test_the_command_takes_the_folder_and_the_user(
    server: Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VEILBASE_CACHE", str(tmp_path))
    words = ["tenant", "generate", PROMPT, "--url", f"ipc:{root / 'dir'}", "--identity", str(root / "acme")]
    words += ["--mask", "off", "--max-new-tokens", "2", "--peer-uid"]
    for uid, code in ((os.geteuid(), 0), (os.geteuid() + 1, 1)):
        monkeypatch.setattr("sys.argv", [*words, str(uid)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code
    assert "tenant: expected" in capsys.readouterr().err


@pytest.mark.usefixtures("server")
def test_names_that_the_model_does_not_have_are_told_before_transformers_is_loaded(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "adapter.yaml").write_text("peft_config: {target_modules: [q_prj]}")
    words = ["tenant", "finetune", "rows.jsonl", "--output", "new", "--config", "adapter.yaml"]
    words += ["--url", f"ipc:{root / 'dir'}", "--identity", str(root / "acme")]
    code = (
        f"import sys; from tenant_sdk import cli; sys.argv = {words!r}\ntry: cli.main()\nfinally: print(*sys.modules)"
    )
    env = {**os.environ, "VEILBASE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stderr.startswith("tenant: target_modules of peft_config names 'q_prj'"), done.stderr
    assert not {"transformers", "grpc"} & set(done.stdout.split())
