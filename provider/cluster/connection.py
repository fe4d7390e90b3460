"""Connects the provider's process to a Ray cluster, after checks that the cluster is closed to strangers.

Guarantees: the address is the one that the operator gave; no file of Ray's with the address of an earlier cluster is
read. The cluster has TLS, client certificates and a token in force, its dashboard is off, and this process sends no
usage statistics. The environment variables are Ray's own (docs/ray.md); nothing of them reaches the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from provider.cluster.proof import ClusterIdentity, prove_tls, prove_token
from wire.errors import ConfigurationError, os_cause

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
