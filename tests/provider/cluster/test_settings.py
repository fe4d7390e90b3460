"""Tests what `provider serve --engine ray` refuses before it connects to anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from provider.cluster import connection
from provider.cluster.connection import cluster_identity, connect, prove_tls, prove_token
from provider.config import load_settings
from tests.support.ray_cluster import make_settings
from tests.support.waiting import WAIT_S, end
from wire.errors import ConfigurationError

FILES = {"server_cert": Path("c"), "server_key": Path("k"), "registry": Path("r")}
RAY = {"tls": True, "engine": "ray", "ray_address": "127.0.0.1:6379", **FILES}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({**RAY, "ray_address": None}, "--ray-address HOST:PORT"),
        ({**RAY, "tls": False}, "got no --tls"),
        ({**RAY, "registry": None}, "got no --registry"),
        ({**RAY, "server_key": None}, "got no --server-key"),
        ({**RAY, "parallel": "tensor"}, "does not go with --parallel"),
        ({**RAY, "names": "gpu7"}, "leave --names out"),
        ({"ray_address": "127.0.0.1:6379"}, "need --engine ray"),
        ({"ray_gpus": 1.0}, "need --engine ray"),
        ({"tls": True, "server_cert": Path("c")}, "got no --server-key"),
        ({**FILES}, "needs --tls"),
    ],
)
def test_settings_that_cannot_be(flags: dict[str, Any], text: str) -> None:
    settings = load_settings(flags)
    with pytest.raises(ConfigurationError, match=text) as caught:
        settings.check_front()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "head", ":6379", "head:6379/x", "a b:1", ""])
def test_an_address_that_ray_would_look_up_or_that_is_none(address: str) -> None:
    settings = load_settings({**RAY, "ray_address": address})
    with pytest.raises(ConfigurationError, match=r"expected --ray-address HOST:PORT, .*, got"):
        settings.check_front()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sets Ray's variables as an operator does, and returns them."""
    settings = make_settings(tmp_path / "ray")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


def test_rays_variables_are_read(environment: dict[str, str]) -> None:
    identity = cluster_identity()
    assert str(identity.token) == environment["RAY_AUTH_TOKEN_PATH"]
    assert str(identity.ca) == environment["RAY_TLS_CA_CERT"]


@pytest.mark.parametrize(
    "name", ["RAY_USE_TLS", "RAY_AUTH_MODE", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT", "RAY_AUTH_TOKEN_PATH"]
)
def test_a_variable_that_is_missing(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=name) as caught:
        cluster_identity()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_KEY", "RAY_AUTH_TOKEN_PATH"])
def test_a_secret_that_others_may_read(environment: dict[str, str], name: str) -> None:
    Path(environment[name]).chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600") as caught:
        cluster_identity()
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text() not in str(caught.value)


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_a_file_that_holds_something_else(environment: dict[str, str], name: str) -> None:
    Path(environment[name]).write_text("nothing of use\n")
    with pytest.raises(ConfigurationError, match="expected PEM files") as caught:
        cluster_identity().context(with_certificate=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [b"", b"\n", b"one\ntwo", "töken".encode(), b"\xff\xfe"])
def test_a_token_that_is_not_one_line_of_text(environment: dict[str, str], token: bytes) -> None:
    Path(environment["RAY_AUTH_TOKEN_PATH"]).write_bytes(token)
    with pytest.raises(ConfigurationError, match="one line of text") as caught:
        prove_token("127.0.0.1", 1, cluster_identity())
    assert "\n" not in str(caught.value)


def test_a_port_that_cannot_be(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="got 99999"):
        connect("127.0.0.1:99999")


def test_a_call_after_the_end_starts_no_other_cluster(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray._private import auto_init_hook, worker

    started: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        started.append(options)
        raise ConnectionError

    for module, name in (
        (worker, "print_to_stdstream"),
        (auto_init_hook, "enable_auto_connect"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores it in the end
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
    for name in ("prove_tls", "prove_token"):
        monkeypatch.setattr(connection, name, lambda *_: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigurationError, match="cannot join"):
        connect("127.0.0.1:6379")
    with contextlib.suppress(Exception):
        ray.get([])
    assert [one["address"] for one in started] == ["127.0.0.1:6379"]


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".x"])
def test_a_host_name_that_cannot_be(environment: dict[str, str], host: str) -> None:
    with pytest.raises(ConfigurationError, match="there is no host") as caught:
        connect(f"{host}:6379")
    assert "\n" not in str(caught.value)


def test_a_head_where_nothing_listens(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConfigurationError, match=f"nothing answers at 127.0.0.1:{port}"):
        connect(f"127.0.0.1:{port}")


def test_a_certificate_that_does_not_name_the_host(environment: dict[str, str]) -> None:
    server, port = grpc_server("closed", environment, "127.0.0.2")
    try:
        with pytest.raises(ConfigurationError, match=r"or its own does not name 127\.0\.0\.2"):
            connect(f"127.0.0.2:{port}")
    finally:
        server.stop(None).wait()


def test_a_head_that_does_not_answer_is_not_called_open(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ConfigurationError, match="does not answer"):
        prove_token("127.0.0.1", port, cluster_identity())


def grpc_server(kind: str, environment: dict[str, str], host: str = "127.0.0.1") -> tuple[grpc.Server, int]:
    """Starts a gRPC server that asks for client certificates, or uses TLS without them, or uses no TLS."""
    server = grpc.server(ThreadPoolExecutor(1))
    if kind == "plain":
        port = server.add_insecure_port(f"{host}:0")
    else:
        key, certificate, ca = (
            Path(environment[f"RAY_TLS_{name}"]).read_bytes() for name in ("SERVER_KEY", "SERVER_CERT", "CA_CERT")
        )
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, kind == "closed")
        port = server.add_secure_port(f"{host}:0", credentials)
    server.start()
    return server, port


@pytest.mark.parametrize(
    ("kind", "text"), [("closed", None), ("everybody", "asks for no certificate"), ("plain", "does not speak TLS")]
)
def test_only_a_server_that_asks_for_certificates_passes(
    environment: dict[str, str], kind: str, text: str | None
) -> None:
    server, port = grpc_server(kind, environment)
    try:
        with contextlib.nullcontext() if text is None else pytest.raises(ConfigurationError, match=text):
            prove_tls("127.0.0.1", port, cluster_identity())
    finally:
        server.stop(None).wait()


def test_a_server_that_answers_nothing_is_not_taken_for_a_closed_one(environment: dict[str, str]) -> None:
    """If a server does not answer the probe at all, this is reported. A silent server must not pass for a safe one."""
    identity = cluster_identity()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WAIT_S)
        hanging_up = threading.Thread(target=lambda: silent.accept()[0].close())
        hanging_up.start()
        with pytest.raises(ConfigurationError, match="does not speak TLS"):
            prove_tls("127.0.0.1", silent.getsockname()[1], identity)
        end(hanging_up)


def test_a_head_that_answers_without_a_token_is_open(environment: dict[str, str]) -> None:
    """This server knows no method, and says so to callers without a token instead of refusing them."""
    server, port = grpc_server("closed", environment)
    try:
        with pytest.raises(ConfigurationError, match="answers without a token"):
            prove_token("127.0.0.1", port, cluster_identity())
    finally:
        server.stop(None).wait()
