"""Runs the servers for the operator: metrics over HTTP, on a loopback port and on a socket in the state directory, and
gRPC's health service.

Guarantees: the ports can be reached from this machine only, and the socket only by its owner if the state directory
has mode 0700, with which the provider creates it. The HTTP servers accept GET only. While the metrics are read,
requests go on: a counter is locked only while it is copied.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import socketserver
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from wire.errors import ConfigurationError

if TYPE_CHECKING:
    import grpc

SOCKET_NAME = "monitor.sock"
SERVICE_NAME = "veilbase.v1.Provider"
METRICS_PATH = "/metrics"
_TIMEOUT_S, _TAKE_AGAIN_S = 10.0, 2.0
_MAX_SOCKET_PATH = 100
"""The most bytes of the socket's path; Linux allows 107."""


class Monitor:
    """Runs the servers that show the provider's metrics and health to the operator; each of the servers is optional."""

    def __init__(self, metrics: CollectorRegistry) -> None:
        """Keeps `metrics`, the registry that GET /metrics shows. No server is started yet."""
        self._metrics = metrics
        self._servers: list[socketserver.BaseServer] = []
        self._health: grpc.Server | None = None
        self._servicer: Any = None
        self._socket: tuple[Path, tuple[int, int]] | None = None
        self._closed = threading.Event()

    def serve_metrics(self, port: int) -> int:
        """Serves the metrics on a loopback port.

        Args:
            port: the port's number; 0 picks a free one.

        Returns:
            The number of the port that was opened.

        Raises:
            ConfigurationError: the port cannot be opened, for example because it is taken.
        """
        try:
            server = _TcpServer(("127.0.0.1", port), _handler(self._metrics))
        except OSError as exc:
            raise ConfigurationError(f"cannot listen on 127.0.0.1:{port} for metrics: is it in use?") from exc
        self._start(server)
        return int(server.server_address[1])

    def serve_socket(self, folder: Path) -> bool:
        """Serves the metrics on a Unix socket in the given folder, from which `provider status` reads the metrics.

        If another provider still uses the socket, a thread retries until that provider has ended.

        Returns:
            True if the socket is open, or a thread retries; False if the folder cannot hold a socket.
        """
        path = folder / SOCKET_NAME
        if len(str(path).encode()) > _MAX_SOCKET_PATH:
            return False
        try:
            if not self._take(path):
                threading.Thread(target=self._take_later, args=(path,), name="veilbase-monitor", daemon=True).start()
        except OSError:
            return False
        return True

    def _take(self, path: Path) -> bool:
        if _answers(path):
            return False
        path.unlink(missing_ok=True)
        self._start(_UnixServer(str(path), _handler(self._metrics)))
        self._socket = path, _identity(path)
        return True

    def _take_later(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            while not self._closed.wait(_TAKE_AGAIN_S) and not self._take(path):
                pass

    def _start(self, server: socketserver.BaseServer) -> None:
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.2,), name="veilbase-monitor", daemon=True).start()

    def serve_health(self, port: int) -> int:
        """Opens gRPC's health service, which reports SERVING, on a loopback port.

        Args:
            port: the port's number; 0 picks a free one.

        Returns:
            The number of the port that was opened.

        Raises:
            ConfigurationError: the port cannot be opened, for example because it is taken.
        """
        import grpc  # here, since `provider status` needs the other half of this module alone
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        servicer = health.HealthServicer()
        server = grpc.server(ThreadPoolExecutor(4, "veilbase-health"), options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        bound = 0
        with contextlib.suppress(RuntimeError):
            bound = server.add_insecure_port(f"127.0.0.1:{port}")
        if not bound:
            raise ConfigurationError(f"cannot listen on 127.0.0.1:{port} for health: is it in use?")
        for name in ("", SERVICE_NAME):
            servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        server.start()
        self._health, self._servicer = server, servicer
        return bound

    def not_serving(self) -> None:
        if self._servicer is not None:
            self._servicer.enter_graceful_shutdown()

    def close(self) -> None:
        """Stops all servers, and removes the socket unless another provider has opened one at its path."""
        self._closed.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self._socket is not None:
            path, identity = self._socket
            with contextlib.suppress(OSError):
                if _identity(path) == identity:  # Otherwise the socket is another provider's.
                    path.unlink()
        if self._health is not None:
            self._health.stop(0).wait()


def _identity(path: Path) -> tuple[int, int]:
    """Returns a file's inode number and modification time, which tell the file from another file that has the same path
    later. The inode number alone is not enough, since a file system may use it again. A socket's modification time does
    not change while the socket is in use."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def read_metrics(folder: Path) -> str:
    """Reads the metrics of the provider that runs with a state directory.

    Args:
        folder: the state directory.

    Returns:
        The metrics in Prometheus' text form.

    Raises:
        ConfigurationError: the provider's socket in the directory cannot be reached, which normally means that no
            provider is running with it; or nothing came for `_TIMEOUT_S` seconds; or what came is not the metrics.
    """
    connection = http.client.HTTPConnection("localhost")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT_S)
            client.connect(str(folder / SOCKET_NAME))
            connection.sock = client
            connection.request("GET", METRICS_PATH)
            answer = connection.getresponse()
            body = answer.read()
    except OSError as exc:
        raise ConfigurationError(f"no provider is running with the state directory {str(folder)!r}") from exc
    except http.client.HTTPException:
        raise ConfigurationError(f"{folder / SOCKET_NAME} does not answer as a provider does: restart it") from None
    if answer.status != http.HTTPStatus.OK:
        raise ConfigurationError(f"the provider has no metrics (status {answer.status}): its log says why")
    return body.decode()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT_S)
        return client.connect_ex(str(path)) == 0


class _Quiet(socketserver.BaseServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores an error in a connection; most such errors mean that the client has closed the connection."""


class _TcpServer(_Quiet, socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class _UnixServer(_Quiet, socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def _handler(metrics: CollectorRegistry) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server_version, sys_version = "veilbase", ""

        def do_GET(self) -> None:
            """Sends the metrics if the URL's path is /metrics, else status 404."""
            if self.path.partition("?")[0] != METRICS_PATH:
                self.send_error(404)
                return
            body = generate_latest(metrics)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Logs nothing, so that no text from a client gets into the log."""

        def address_string(self) -> str:
            return "local"  # A Unix socket's peer has no address.

    return Handler
