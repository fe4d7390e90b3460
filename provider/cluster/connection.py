"""Connects the provider's process to a Ray cluster, after checks that the cluster is closed to strangers.

Ray takes the certificate and the token from environment variables, separately on each host. A host where one of them
was forgotten runs as well as the others, and runs code for anybody who connects. So each server is tried in the wrong
ways, and these connections must fail. A connection in the right way, with certificate and token, must succeed, which
shows that the other connections failed for lack of these.

Guarantees: the address is the one that the operator gave; no file of Ray's with the address of an earlier cluster is
read. The cluster has TLS, client certificates and a token in force, its dashboard is off, and this process sends no
usage statistics. The environment variables are Ray's own (docs/ray.md); nothing of them reaches the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from wire.errors import ConfigurationError, os_cause

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The bytes that an HTTP/2 client sends first: the connection preface and an empty SETTINGS frame (RFC 9113, section
3.4)."""
_SETTINGS_TYPE, _TYPE_AT = 4, 3
"""The type of a SETTINGS frame, which is a server's first, and the place of the type in a frame's header."""
_PROBE_S = 5.0
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A method of the head that takes an empty message and changes nothing."""


@dataclass(frozen=True)
class ClusterIdentity:
    """Names the files with which this host takes part in the cluster: Ray's own settings of TLS, and the token."""

    certificate: Path
    key: Path
    ca: Path
    token: Path

    def context(self, with_certificate: bool) -> ssl.SSLContext:
        """Returns a TLS context that trusts the cluster's CA, as Ray's own connections do.

        Raises:
            ConfigurationError: the files do not belong together, or hold something else.
        """
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            context.set_alpn_protocols(["h2"])
            if with_certificate:
                # A key with a password is refused; without this, OpenSSL would ask for the password at the terminal.
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError):  # `from None`: the original may be about the key.
            raise ConfigurationError(
                "expected PEM files with a certificate, its private key and the CA in RAY_TLS_SERVER_CERT, "
                "RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT, found others (docs/ray.md)"
            ) from None
        return context

    def read_token(self) -> str:
        """Returns the token.

        Raises:
            ConfigurationError: the file does not hold one line of printable ASCII.
        """
        with contextlib.suppress(OSError, ValueError):
            token = self.token.read_text("ascii").strip()
            if token and token.isprintable():
                return token
        raise ConfigurationError("expected one line of text in the file of RAY_AUTH_TOKEN_PATH")


def prove_tls(host: str, port: int, identity: ClusterIdentity) -> None:
    """Checks that a server speaks TLS only, and only with peers that have a certificate of the cluster.

    Raises:
        ConfigurationError: the server lets in a peer without one, refuses this host's certificate, or cannot be
            reached.
    """
    where = f"{host}:{port}"
    if not _is_let_in(host, port, identity.context(with_certificate=True)):
        raise ConfigurationError(
            f"the cluster's server {where} does not speak TLS with the certificate of RAY_TLS_SERVER_CERT, or its own "
            f"does not name {host}: start every node with RAY_USE_TLS=1 and certificates of one CA (docs/ray.md)"
        )
    if _is_let_in(host, port, None):
        raise ConfigurationError(f"the cluster's server {where} speaks without TLS too: start it with RAY_USE_TLS=1")
    if _is_let_in(host, port, identity.context(with_certificate=False)):
        raise ConfigurationError(f"the cluster's server {where} asks for no certificate: set RAY_TLS_CA_CERT there")


def prove_token(host: str, port: int, identity: ClusterIdentity) -> None:
    """Checks that the cluster's head answers no call without the token, even with a certificate of the cluster.

    Raises:
        ConfigurationError: the head answers a call without the token, refuses one with the token, or does not answer at
            all; or the token's file is not valid.
    """
    token = identity.read_token()
    code = _code_of_call(host, port, identity, None)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise ConfigurationError(f"the cluster's head {host}:{port} does not answer: does it still run?")
    if code != grpc.StatusCode.UNAUTHENTICATED:
        raise ConfigurationError(
            f"the cluster's head {host}:{port} answers without a token: start it with RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH (docs/ray.md)"
        )
    if _code_of_call(host, port, identity, token) != grpc.StatusCode.OK:
        raise ConfigurationError(f"the cluster's head {host}:{port} refuses the token of RAY_AUTH_TOKEN_PATH")


def _connected(host: str, port: int) -> socket.socket:
    """Returns a connection to a server; raises ConfigurationError if there is none."""
    try:
        return socket.create_connection((host, port), _PROBE_S)
    except (socket.gaierror, UnicodeError):  # the latter: a part of the name is empty or too long
        raise ConfigurationError(f"there is no host {ascii(host)[:80]}: is its name right?") from None
    except OSError as exc:
        raise ConfigurationError(f"nothing answers at {host}:{port}: does a Ray node run there?") from os_cause(exc)


def _is_let_in(host: str, port: int, context: ssl.SSLContext | None) -> bool:
    """Returns whether a server answers this way of connecting with its first HTTP/2 frame.

    Raises:
        ConfigurationError: the server cannot be reached.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as ending:
        connection = ending.enter_context(_connected(host, port))
        if context is not None:
            connection = ending.enter_context(context.wrap_socket(connection, server_hostname=host))
        connection.sendall(_PREFACE)
        answer = b""
        while len(answer) <= _TYPE_AT and (part := connection.recv(64)):
            answer += part
        return len(answer) > _TYPE_AT and answer[_TYPE_AT] == _SETTINGS_TYPE
    return False


def _code_of_call(host: str, port: int, identity: ClusterIdentity, token: str | None) -> grpc.StatusCode:
    credentials = grpc.ssl_channel_credentials(
        identity.ca.read_bytes(), identity.key.read_bytes(), identity.certificate.read_bytes()
    )
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.secure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials) as channel:
        try:
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=_PROBE_S, metadata=metadata)
        except grpc.RpcError as exc:
            return exc.code()
        return grpc.StatusCode.OK


_LOOK_S = 1.0
"""The seconds between two looks at whether this host's Ray node still runs."""
_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT", "RAY_AUTH_TOKEN_PATH")


def cluster_identity() -> ClusterIdentity:
    """Reads Ray's settings of TLS and token from the environment.

    Raises:
        ConfigurationError: a variable is missing, or a file cannot be used or can be read by others.
    """
    for name, value in (("RAY_USE_TLS", "1"), ("RAY_AUTH_MODE", "token")):
        if os.environ.get(name) != value:
            raise ConfigurationError(f"--engine ray needs the environment variable {name}={value} (docs/ray.md)")
    for name in _FILES:
        if not os.environ.get(name):
            raise ConfigurationError(f"--engine ray needs the environment variable {name}, a file's path (docs/ray.md)")
    paths = [Path(os.environ[name]) for name in _FILES]
    for name, path in zip(_FILES, paths, strict=True):
        try:
            if not path.is_file():
                raise ConfigurationError(f"--engine ray needs {name} to name a file, got none at {str(path)!r}")
            if name.endswith(("KEY", "TOKEN_PATH")) and path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"expected {str(path)!r} ({name}) to be readable by its owner only: run chmod 600 on it"
                )
        except OSError as exc:
            raise ConfigurationError(f"cannot use {str(path)!r} ({name}): {exc.strerror}") from os_cause(exc)
    certificate, key, ca, token = paths
    return ClusterIdentity(certificate, key, ca, token)


def check_head(address: str) -> ClusterIdentity:
    """Proves that a cluster's head is closed to strangers.

    Args:
        address: host and port of the head.

    Returns:
        The files with which this host takes part in the cluster.

    Raises:
        ConfigurationError: the head is open or cannot be reached, or the environment is not as docs/ray.md says.
    """
    identity = cluster_identity()
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not 0 < int(port) < 1 << 16:
        raise ConfigurationError(f"expected the port of the cluster's head in --ray-address, got {port}")
    prove_tls(host, int(port), identity)
    prove_token(host, int(port), identity)
    return identity


def connect(address: str) -> None:
    """Proves that a cluster is closed to strangers, and makes this process a driver of it.

    Args:
        address: host and port of the cluster's head.

    Raises:
        ConfigurationError: the cluster is open, cannot be reached, has its dashboard on or runs another release of Ray;
            or Ray is not installed.
    """
    identity = check_head(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray's own lines name hosts and repeat every second.
    try:
        import ray
    except ImportError as exc:
        raise ConfigurationError("--engine ray needs Ray: pip install 'veilbase[ray]'") from exc
    # Ray would print the cluster's error messages, which may quote what a failed call was given, to standard output.
    # It has no setting for this thread's output (2.60); a test sees that nothing is printed.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # A call of Ray's after the connection has ended would connect this process to a cluster that Ray looks up in a file
    # or a variable, or would start one here, whatever its settings.
    ray._private.auto_init_hook.enable_auto_connect = False
    with _own_signals():
        try:
            context: Any = ray.init(address=address, log_to_driver=False, configure_logging=False)
        except RuntimeError as exc:
            if "Version mismatch" in str(exc):
                raise ConfigurationError(
                    f"the cluster at {address} runs another release of Ray or Python than this host (Ray "
                    f"{ray.__version__}): install the same everywhere"
                ) from None
            raise _unreachable(address) from None
        except (ConnectionError, OSError, ValueError, ray.exceptions.RayError):
            raise _unreachable(address) from None
    try:
        if context.dashboard_url:
            raise ConfigurationError(
                "the cluster's dashboard is on: start its head with --include-dashboard=false, since the dashboard "
                "starts jobs for whoever reaches it"
            )
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        for node in nodes:
            if node["Alive"]:
                prove_tls(node["NodeManagerAddress"], node["NodeManagerPort"], identity)
    except BaseException:
        ray.shutdown()
        raise


def watch_node(on_lost: Callable[[], None]) -> None:
    """Starts a thread that calls `on_lost` once this host's Ray node has ended. Ray does not connect a process to
    another node."""
    import ray

    own = ray.get_runtime_context().get_node_id()

    def watch() -> None:
        while ray.is_initialized():
            time.sleep(_LOOK_S)
            nodes: list[dict[str, Any]] = []
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError, OSError):
                nodes = ray.nodes()  # type: ignore[no-untyped-call]
            if any(node["NodeID"] == own and not node["Alive"] for node in nodes):
                on_lost()
                return

    threading.Thread(target=watch, name="veilbase-ray-node", daemon=True).start()


def _unreachable(address: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot join the Ray cluster at {address}: does a Ray node run on this host (`ray start`), and is the address "
        "that of its head?"
    )


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's handlers of signals, which `ray.init` replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
