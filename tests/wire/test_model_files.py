"""Tests what is told of a model's files without loading one."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import errors

from wire.errors import ConfigurationError
from wire.model_files import (
    check_config,
    check_gguf,
    check_hub_answers,
    check_json_object,
    check_safetensors,
    existing,
    not_from_hub,
)

SECRET = "hunter2"
HEADER = (2).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("check", "content", "is_right"),
    [
        (check_gguf, b"GGUF and more", True), (check_gguf, b"GGU", False), (check_gguf, SECRET.encode(), False),
        (check_safetensors, HEADER + b"{}", True), (check_safetensors, HEADER + b"{", False),
        (check_safetensors, HEADER + b"[]", False), (check_safetensors, b"\xff" * 40, False),
        (check_safetensors, b"", False), (check_json_object, b"{}", True), (check_json_object, b"[]", False),
        (check_json_object, f"{{{SECRET}".encode(), False), (check_json_object, b"\xff{}", False),
        (check_json_object, b"[" * 100_000, False), (check_json_object, b"", False),
    ],
)  # fmt: skip
def test_a_file_that_begins_as_another_is_refused(
    check: Callable[[Path], None], content: bytes, is_right: bool, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    if is_right:
        check(file)
        return
    with pytest.raises(ConfigurationError) as failure:
        check(file)
    assert str(file) in str(failure.value)
    assert SECRET not in str(failure.value)


@pytest.mark.parametrize("check", [check_gguf, check_safetensors, check_json_object])
def test_what_cannot_be_read_is_one_line(check: Callable[[Path], None], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigurationError, match="cannot be read: ") as failure:
            check(path)
        assert "\n" not in str(failure.value)


def test_of_a_large_file_only_the_beginning_counts(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"vocabulary": "x" * (5 << 20)}))
    check_json_object(file)
    file.write_text(json.dumps(["x" * (5 << 20)]))
    with pytest.raises(ConfigurationError, match="expected a JSON object"):
        check_json_object(file)


def test_a_folder_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a Hugging Face folder with a config\.json, got 'given'"):
        check_config(tmp_path, "given")
    (tmp_path / "config.json").write_text("{}")
    check_config(tmp_path, "given")


def test_names_that_are_no_paths_name_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    assert existing("here") == Path("here")
    assert existing("~/here") == tmp_path / "here"
    for name in ("", "none", "x" * 300, "a\0b", "~no-such-user-here/x", f"here{os.sep}" * 2000):
        assert existing(name) is None, name[:20]


# ---- hub ids ---------------------------------------------------------------------------------------------------------


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(
        ConfigurationError, match=r"the model 'a/b' is not cached here, .* the hub cannot be reached: ch"
    ):
        check_hub_answers("model", "a/b")
    (tmp_path / "models--a--b").mkdir()
    check_hub_answers("model", "a/b@main")


def test_a_hub_that_answers_anything_is_left_to_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a mirror that refuses the question."""

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        check_hub_answers("model", "a/b")
        thread.join()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.GatedRepoError, "set HF_TOKEN"), (errors.RepositoryNotFoundError, "no such model"),
        (errors.RevisionNotFoundError, "after the @"), (errors.LocalEntryNotFoundError, "check the network"),
        (OSError, "check the network"),
    ],
)  # fmt: skip
def test_what_the_hub_did_not_give_is_told_without_the_name_of_a_class(kind: type[Exception], expected: str) -> None:
    told = not_from_hub("checkpoint", "owner/model", kind.__new__(kind))
    assert expected in told
    assert "HF_HUB_OFFLINE=0" in told
    assert "Error" not in told
