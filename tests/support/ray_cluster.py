"""Runs a Ray cluster of several nodes on this machine's loopback device, with TLS and a token."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trustme

from tests.support.waiting import WAIT_S, until

_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Returns why no namespace can be made here, or None if one can."""
    done = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True)
    return None if done.returncode == 0 else "network namespaces need root and iproute2"


@contextlib.contextmanager
def private_network() -> Iterator[None]:
    """Within this context, the calling thread's sockets, and those of threads and processes that it starts, reach only
    each other."""
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        libc.setns(outside, _CLONE_NEWNET)
        os.close(outside)


STORE_BYTES = 200 << 20
"""The bytes of each node's object store."""


class RayCluster:
    """Runs a head and further nodes. A node is named by the process id of its raylet, its main process.

    A process of its own starts and ends them: Ray reads its settings once in a process, when it is first imported, and
    the tests' process may have imported it without them. The environment of this process has the settings until
    `close`, for providers that the tests start.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        """Starts the nodes, and puts certificates and the token into a folder."""
        self._before = dict(os.environ)
        os.environ.update(make_settings(folder))
        context = multiprocessing.get_context("spawn")
        self._orders, orders = context.Pipe()
        self._process = context.Process(target=run_nodes, args=(orders,))
        self._process.start()
        orders.close()
        self.address: str = self._answer()
        self.head: int = self._answer()
        self.nodes: list[int] = []
        for _ in range(num_nodes - 1):
            self.add_node()

    def add_node(self) -> None:
        """Adds a node to `nodes`."""
        self._orders.send(None)
        self.nodes.append(self._answer())

    def remove(self, node: int) -> None:
        """Ends a node's processes at once, as a lost host would end, and takes it out of `nodes`."""
        self._orders.send(node)
        self._answer()
        self.nodes.remove(node)

    def close(self) -> None:
        """Ends all nodes and restores the environment."""
        self._orders.close()
        self._process.join(WAIT_S)
        os.environ.clear()
        os.environ.update(self._before)

    def _answer(self) -> Any:
        """Returns what `run_nodes` sends next.

        Raises:
            EOFError: It has ended.
            TimeoutError: Nothing came in time.
        """
        if not self._orders.poll(WAIT_S):
            raise TimeoutError("the process that starts Ray's nodes did not answer")
        return self._orders.recv()


def run_nodes(orders: Connection) -> None:
    """Starts a head and sends its address and its raylet's process id; then obeys each order until the pipe is closed.

    None is the order to start a node, answered by its raylet's process id; a process id is the order to end that node,
    answered by None.
    """
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "memory": 1 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    nodes: dict[int, Any] = {}
    try:
        orders.send(cluster.address)
        orders.send(raylet_pid(cluster.head_node))
        while True:
            if (pid := orders.recv()) is None:
                node = cluster.add_node(**options)
                nodes[raylet_pid(node)] = node
                orders.send(raylet_pid(node))
            else:
                orders.send(cluster.remove_node(nodes.pop(pid), allow_graceful=False))
    except EOFError:
        pass  # closed: there are no more orders
    finally:
        cluster.shutdown()


def raylet_pid(node: Any) -> int:
    """Returns the process id of a node's raylet."""
    return int(node.all_processes["raylet"][0].process.pid)


@contextlib.contextmanager
def lone_head(environment: dict[str, str], port: int) -> Iterator[str]:
    """Runs a head alone, with Ray's settings from an environment, in a process of its own.

    Yields:
        The head's address.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    command += ["--include-dashboard=false", "--num-cpus=0", f"--object-store-memory={STORE_BYTES}"]
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_answering(port), "Ray's head")
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()  # It ends all that it started.
        head.wait(WAIT_S)


def is_answering(port: int) -> bool:
    """Returns whether something listens on a port of the loopback device."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_S):
        return True
    return False


def make_settings(folder: Path) -> dict[str, str]:
    """Writes certificates and a token to a folder. Returns the environment variables that name them."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    for name, data in (("key.pem", certificate.private_key_pem.bytes()), ("token", os.urandom(32).hex().encode())):
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(data)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "cert.pem"),
        "RAY_TLS_SERVER_KEY": str(folder / "key.pem"),
        "RAY_TLS_CA_CERT": str(folder / "ca.pem"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_max_direct_call_object_size": str(16 << 20),
        "RAY_task_rpc_inlined_bytes_limit": str(64 << 20),
    }


def actor_pids() -> list[int]:
    """Returns the process ids of the shards' actors in this network namespace, the oldest first."""
    here, found = os.stat("/proc/thread-self/ns/net").st_ino, []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may have ended meanwhile
            is_actor = (folder / "cmdline").read_bytes().startswith(b"ray::ShardActor")
            if is_actor and os.stat(folder / "ns/net").st_ino == here:
                found.append(int(folder.name))
    return sorted(found)


def node_of(pid: int) -> int:
    """Returns the process id of the node (Ray calls it raylet) to which an actor's process belongs."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
