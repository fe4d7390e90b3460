"""Runs `provider serve`: turns settings into a server, waits for a signal, and shuts everything down in order."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from provider.config import ProviderSettings
from provider.model.load import resolve
from provider.net.descriptors import raise_file_limit
from provider.parallel.environment import rank_here
from runtime.command_line import TOLD_AGAIN_S, told_if_slow
from runtime.compiled import unknown_kernels
from runtime.files import nearest_there, why_not_writable
from runtime.stopping import INTERRUPTED, at_once, tell_stopped
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from provider.engine.replica import Product, Replica
    from provider.identity.authority import StateDir
    from provider.identity.front import FrontIdentity
    from provider.model.served_model import ServedModel
    from provider.net.admission import Admission
    from provider.net.server import Server
    from provider.net.service import ProviderService
    from provider.net.windows import Windows
    from provider.operations.monitor import Monitor
    from provider.schedule.scheduler import Scheduler
    from provider.shards.router import Shard

_JOIN_LOOK_S = 0.05
INDEX_NAME = "index.jsonl"
"""The name of the file that every recording has (provider/operations/recording.py)."""
ENDPOINT_FILE = "endpoint"
"""The name of the file in the state directory that holds the URL of the last `provider serve --tls`; `enroll` reads
this file."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Numbers of the parameters of `mallopt`, from glibc's malloc.h."""
_FREE_BYTES_KEPT = 64 << 20
"""Free bytes that stay at the heap's end, the same number that malloc's own rule allows. With 32 MiB, pages were
returned and requested again so often that the processor time, without the products, was 1.4 times as high."""
_MAPPED_BYTES = 1 << 20
"""The least size, in bytes, of a block that malloc maps separately if the block fits nowhere in the heap. The memory of
such a block returns to the system when the block is freed. The number is the size of a frame's chunk on the wire."""
NODE_LOST_EXIT = 69
"""The exit status of a provider whose host's Ray node has ended: EX_UNAVAILABLE of sysexits.h."""
_EARLY_STATUS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 0}
"""The exit status after a signal that comes before the provider is ready: a supervisor that stops it with SIGTERM has
what it wants."""
_NO_SUITE_OF_OURS = "ECDHE-RSA-AES256-GCM-SHA384"
_LOGGER = logging.getLogger(__name__)


def serve(settings: ProviderSettings) -> None:
    """Serves until SIGTERM or SIGINT, then finishes the requests in flight, for at most the time of the setting
    `drain_s`. SIGHUP renews the server's certificate.

    Raises:
        VeilbaseError: the provider cannot start; the message says what the operator has to change.
        SystemExit: a signal has ended the provider.
    """
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # `_wait_for_the_end` handles SIGHUP.
    with at_once("provider", _EARLY_STATUS):
        if reason := unknown_kernels():
            raise ConfigurationError(reason)
        settings.check_exposure()
        settings.check_front()
        settings.check_shards()
        settings.check_parallel()
        settings.check_device()
        settings.check_conflicts()
        rank = rank_here(settings.parallel)
        share_one_heap()
        raise_file_limit()
        if settings.tls:
            refuse_tls_1_2()
        if not rank:
            resolve(settings.model)  # A mistake in the name is told at once.
            check_ports(settings)
            state = _open_state(settings)
            _write_endpoint(settings, settings.port, state)
            from provider.net.admission import Admission  # Imported here since torch takes seconds to import.
            from provider.net.server import Server
            from provider.operations.usage import FILE_NAME, UsageBook
    signal.signal(signal.SIGTERM, _stop_early)
    signal.signal(signal.SIGINT, _stop_early)
    if rank:
        from provider.parallel.start import help_out

        return help_out(settings)
    with ExitStack() as ending:  # The callbacks run in reverse order, even if one of them fails.
        usage = UsageBook(None if state is None else state.path / FILE_NAME)
        tensor_port = None if settings.tensor_port == "none" else settings.tensor_port
        server = Server(settings.host, settings.port, state, settings.certificate_names, tensor_port, settings.ipc)
        ending.callback(server.stop)  # This stops the server if the start fails.
        _write_endpoint(settings, server.port, state)
        model = _make_model(settings)
        ending.callback(model.close)
        admission = Admission(settings.tenant_limits, settings.max_in_flight_bytes)
        shards, busy_poll_s = _make_shards(settings, model, admission, ending), settings.busy_poll_ms / 1000
        windows = _make_windows(settings, shards)
        if windows is not None:
            ending.callback(windows.drop)
        service = server.start(model, shards, admission, usage, busy_poll_s, windows)
        monitor = _make_monitor(settings, server, service, state)
        ending.callback(monitor.close)
        ending.callback(usage.close)
        ending.callback(server.stop, settings.drain_s)
        # Usage is saved early in the shutdown: a supervisor may kill this process before the later steps are done.
        ending.callback(usage.save)
        ending.callback(monitor.not_serving)
        usage.keep_saving()
        while not all(num_live for num_live, _ in service.num_replicas):
            time.sleep(_JOIN_LOOK_S)  # A signal also ends this wait.
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        ending.callback(_LOGGER.info, "stopping: requests in flight have at most %g s", settings.drain_s)
        _announce(settings, server.port)
        _wait_for_the_end(server)


def _stop(number: int, _frame: object) -> None:
    _ignore_signals()
    sys.exit(NODE_LOST_EXIT if number == signal.SIGUSR1 else 0)


def _stop_early(number: int, _frame: object) -> None:
    """Ends a provider that nobody could use yet, and says so."""
    _ignore_signals()
    tell_stopped("provider")
    sys.exit(_EARLY_STATUS[signal.Signals(number)])


def _ignore_signals() -> None:
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)  # A second signal must not interrupt the shutdown, nor change its status.


def _wait_for_the_end(server: Server) -> None:
    """Waits until a signal stops the provider, and misses no signal; `_stop` ends the wait.

    A wait for a lock could miss a signal that arrives just before the wait begins: the interpreter would run the
    signal's handler only after the lock is acquired, which never happens. So this function reads from a socket. The
    interpreter writes the number of each signal to the socket, and the number stays there until it is read.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer:
        signal.set_wakeup_fd(writer.fileno())
        try:
            while True:
                if signal.SIGHUP in reader.recv(64):
                    server.renew_certificate()
                    _LOGGER.info("SIGHUP: the next connection gets a new certificate")
        finally:
            signal.set_wakeup_fd(-1)


def share_one_heap() -> None:
    """Makes all threads use one heap, so that memory grows neither with steps nor with tenants.

    Callers must call this before other threads start. By default, glibc gives each thread a heap of its own. After the
    first large block is freed, it also keeps blocks of up to 32 MiB in these heaps. A tensor passes through several
    threads per tenant, so many heaps kept free blocks of every size: with four tenants these were 400 to 500 MB, and
    still growing (benchmarks/memory.py; docs/benchmarks_history.md, "Memory"). With another libc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_TRIM_THRESHOLD, _FREE_BYTES_KEPT)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def refuse_tls_1_2() -> None:
    """Makes gRPC's ports of this process accept TLS 1.3 only.

    Callers must call this before grpc is imported, since grpc reads the environment variable at import. gRPC for Python
    has no setting for the lowest TLS version, but it has a list of cipher suites. The list applies to TLS 1.2 only; the
    suites of TLS 1.3 are fixed in BoringSSL. The list set here holds one suite, which needs an RSA key. Every server
    certificate has a P-256 key (`provider.identity.authority`), so no TLS 1.2 handshake can succeed. A list of the
    operator's own is overwritten, since any list with an ECDSA suite would allow TLS 1.2 again.
    """
    if "grpc" in sys.modules:
        _LOGGER.warning("gRPC was loaded before the provider was started: its port takes TLS 1.2 as well as 1.3")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _NO_SUITE_OF_OURS


def _open_state(settings: ProviderSettings) -> StateDir | FrontIdentity | None:
    from provider.identity.authority import StateDir
    from provider.identity.front import FrontFiles, FrontIdentity

    if settings.server_cert is None or settings.server_key is None or settings.registry is None:
        state: StateDir | FrontIdentity | None = StateDir(settings.state) if settings.tls else None
    else:
        files = FrontFiles(settings.server_cert, settings.server_key, settings.registry, settings.registry_max_age_s)
        state = FrontIdentity(files, settings.state)
    _check_folders(settings, state)
    return state


def _make_model(settings: ProviderSettings) -> ServedModel:
    import torch

    from provider.model.load import load
    from provider.model.served_model import ServedModel
    from provider.model.weight_file import WeightFile
    from provider.model.weights import return_freed_memory, serve_model
    from provider.operations.recording import Recorder

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.device.startswith("cuda"):
        from provider.device.choice import find

        find(settings.device)  # A device that is not there is refused before the model is loaded, which takes time.
    if settings.engine == "ray" and settings.ray_address is not None:
        from provider.cluster.connection import check_head

        check_head(settings.ray_address)  # What is missing is said before the model is loaded.
    ranks = None
    if settings.parallel != "none":
        from provider.parallel.start import meet

        ranks = meet(settings.parallel_timeout_s)
    source = resolve(settings.model)
    _LOGGER.info("loading %s", source.model_id)
    parent = settings.state if settings.tls else None
    with told_if_slow(f"still loading {source.model_id}", _LOGGER.info, TOLD_AGAIN_S):
        served = serve_model(
            load(source),
            settings.weights,
            settings.base_layers,
            bundle_parent=parent,
            recording=settings.record is not None,
        )
    recorder = None
    if settings.record is not None:
        recorder = Recorder(settings.record, served.manifest, settings.record_limit, settings.record_layers)
    weight_file = None
    if any(each.weight_bytes_per_day for each in settings.tenant_limits.values()):
        weight_file = WeightFile(served.groups, parent)  # Here, since other processes may compute.
    num_layers = sum(len(group.info.layers) for group in served.groups)
    _LOGGER.info(
        "serving %d layers in %d groups, %s weights, %.0f MB",
        num_layers, len(served.groups), settings.weights, served.weight_bytes / 1e6,
    )  # fmt: skip
    if ranks is not None:
        from provider.parallel.start import lead

        model: ServedModel = lead(settings, ranks, served, recorder)
        del served  # This rank keeps its own share of the weights.
        return_freed_memory()
    else:
        model = ServedModel(served, recorder)
    model.weight_file = weight_file
    return model


def _make_shards(
    settings: ProviderSettings, model: ServedModel, admission: Admission, ending: ExitStack
) -> list[Shard]:
    """Makes the shards, each with its replicas and its scheduler.

    If other processes or a device compute, this process drops its own copy of the weights. Raises ConfigurationError
    if that process or device cannot be used.
    """
    from provider.net.server import whole

    is_alone = settings.shards == settings.replicas == 1
    if is_alone and settings.engine == "local":
        return [_on_device(settings, model, admission, ending) or whole(
            model, _make_scheduler(settings, model, admission, model.compute)
        )]  # fmt: skip
    from provider.engine.replica import ReplicaLost
    from provider.shards.router import Shard

    plan, replicas_of_shards = _start_replicas(settings, model, ending)
    model.let_weights_go()
    shards = []
    for number, (ids, replicas) in enumerate(zip(plan, replicas_of_shards, strict=True)):
        try:
            scheduler = _make_scheduler(settings, model, admission, replicas[0].product, ids)
        except ReplicaLost as exc:
            raise ConfigurationError(f"the process of shard {number} ended while it was timed") from exc
        shards.append(Shard(ids, replicas, scheduler))
        where = f"{len(replicas)} process{'' if len(replicas) == 1 else 'es'}"
        _LOGGER.info("shard %d: groups %d to %d, %s", number, ids[0], ids[-1], where)
    return shards


def _start_replicas(
    settings: ProviderSettings, model: ServedModel, ending: ExitStack
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[Replica]]]:
    """Starts the processes that compute: on this host, or on the hosts of a Ray cluster. `ending` will end them.

    Returns:
        For each shard, the ids of its layer groups; and for each shard, its replicas.
    """
    if settings.engine == "ray" and settings.ray_address is not None:
        from provider.cluster.connection import connect, watch_node

        connect(settings.ray_address)
        signal.signal(signal.SIGUSR1, _stop)
        watch_node(_end_without_node)
        from provider.cluster.actors import ClusterShards

        source = settings.model, settings.weights, settings.base_layers
        _LOGGER.info("waiting for %d actors to load their weights", settings.shards * settings.replicas)
        actors = ClusterShards.start(
            model.served, settings.shards, settings.replicas, source, settings.threads, settings.ray_gpus
        )
        ending.callback(actors.close)
        return actors.plan, actors.replicas
    from provider.shards.local import LocalShards

    parent = settings.state if settings.tls else None
    local = LocalShards.start(
        model.served, settings.shards, settings.replicas, parent, settings.threads, settings.device
    )  # fmt: skip
    ending.callback(local.close)
    return local.plan, local.replicas


def _end_without_node() -> None:
    _LOGGER.error("this host's Ray node has ended: start it again, and then the provider")
    os.kill(os.getpid(), signal.SIGUSR1)


def _on_device(settings: ProviderSettings, model: ServedModel, admission: Admission, ending: ExitStack) -> Shard | None:
    """Makes the shard that holds all groups on an accelerator; returns None if the CPU computes."""
    if settings.parallel != "none":
        return None
    from provider.device.choice import choose

    device = choose(settings.device, 0, model.served.groups)
    if device is None:
        return None
    from provider.device.on_device import OnDevice
    from provider.model.weights import return_freed_memory
    from provider.shards.router import Shard

    groups = model.take_weights()
    replica = OnDevice(groups, device)
    ending.callback(replica.close)
    return_freed_memory()
    scheduler = _make_scheduler(settings, model, admission, replica.product)
    return Shard(range(len(model.manifest().groups)), [replica], scheduler)


def _make_windows(settings: ProviderSettings, shards: Sequence[Shard]) -> Windows | None:
    """Makes what shares the device's memory with tenants; returns None if the operator asks for none, or the CPU
    computes."""
    if not settings.gpu_windows:
        return None
    from provider.device.on_device import OnDevice
    from provider.net.windows import Windows

    replica = shards[0].replicas[0]
    if not isinstance(replica, OnDevice):
        _LOGGER.info("no GPU memory is shared with tenants: the CPU computes")
        return None
    return Windows(replica.device, settings.gpu_windows)


def _make_scheduler(
    settings: ProviderSettings,
    model: ServedModel,
    admission: Admission,
    product: Product | None = None,
    ids: Collection[int] | None = None,
) -> Scheduler:
    from provider.engine.profile import make_scheduler
    from provider.schedule.fairness import Policy

    policy = Policy(
        settings.batching,
        max_wait_s=settings.max_wait_ms / 1000,
        slo_s=None if settings.slo_ms is None else settings.slo_ms / 1000,
    )
    is_here = bool(model.served.groups)
    return make_scheduler(
        model.served, policy, is_here or product is not None, admission.weight_of, product=product, ids=ids
    )


def _num_connections(server: Server) -> tuple[int, int]:
    """Returns two counts of all ports that take streams: connections with a stream, and connections without one."""
    found = [port.status() for port in (server.tensors, server.ipc) if port is not None]
    num_guests = sum(one.num_guests for one in found)
    return sum(one.num_connections for one in found) - num_guests, num_guests


def _make_monitor(
    settings: ProviderSettings, server: Server, service: ProviderService, state: StateDir | FrontIdentity | None
) -> Monitor:
    from provider.operations.metrics import ProviderCollector, registry
    from provider.operations.monitor import Monitor

    collector = ProviderCollector(
        service.meter,
        service.usage,
        lambda: service.queue_depth,
        lambda: service.status().num_streams,
        lambda: service.num_replicas,
        lambda: service.num_given_up,
        lambda: _num_connections(server),
        lambda: service.registry_seconds_left,
    )
    monitor = Monitor(registry(collector))
    if state is not None and not monitor.serve_socket(state.path):
        _LOGGER.warning("`provider status` cannot reach this provider: no socket can be made in its state directory")
    if settings.metrics_port is not None:
        _LOGGER.info("metrics at http://127.0.0.1:%d/metrics", monitor.serve_metrics(settings.metrics_port))
    if settings.health_port is not None:
        _LOGGER.info("health at 127.0.0.1:%d", monitor.serve_health(settings.health_port))
    return monitor


def check_ports(settings: ProviderSettings) -> None:
    """Binds the ports that the settings name, and closes them again: a port that cannot be had is then told before
    torch is imported. Whoever takes a port after that is noticed when `Server` binds it.

    Raises:
        ConfigurationError: a port is in use, or the address is not an address of this machine.
    """
    host = settings.host
    if not _can_listen(host, settings.port):
        address = f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"
        raise ConfigurationError(f"cannot listen on {address}: is it in use, or not an address of this machine?")
    if settings.tls and settings.tensor_port != "none" and not _can_listen(host, settings.tensor_port):
        raise ConfigurationError(
            f"cannot listen on {host}, port {settings.tensor_port}, for tensors: is it in use, or not an address of "
            "this machine?"
        )
    for port, what in ((settings.metrics_port, "metrics"), (settings.health_port, "health")):
        if port is not None and not _can_listen("127.0.0.1", port):
            raise ConfigurationError(f"cannot listen on 127.0.0.1:{port} for {what}: is it in use?")


def _check_folders(settings: ProviderSettings, state: StateDir | FrontIdentity | None) -> None:
    """Checks what the settings name besides the model, as far as that is possible before torch is imported: the names
    of the certificate, and the folders of usage, socket and recording.

    Raises:
        ConfigurationError: a name cannot be in a certificate, a folder cannot be used or made, the usage file is
            damaged, or the recording's folder holds one already.
    """
    from provider.identity.authority import StateDir, issue_server_certificate
    from wire.transport.ipc.folder import check_folder
    from wire.usage import FILE_NAME, read_usage_file

    if isinstance(state, StateDir):
        issue_server_certificate(state, settings.host, settings.certificate_names)
    if state is not None:
        read_usage_file(state.path / FILE_NAME)
    if settings.ipc is not None:
        folder = Path(os.path.abspath(settings.ipc))
        if folder.is_dir():
            check_folder(folder, os.geteuid())
        _check_made(folder, f"cannot make a socket in {folder}", with_parents=False)
    if settings.record is not None:
        if (settings.record / INDEX_NAME).exists():
            raise ConfigurationError(f"{settings.record} holds a recording already: choose another --record")
        _check_made(settings.record.absolute(), f"cannot record to {settings.record}", with_parents=True)


def _check_made(folder: Path, what: str, with_parents: bool) -> None:
    """Raises ConfigurationError if a folder can neither be written to nor be made."""
    there = nearest_there(folder)
    if not there.is_dir():
        raise ConfigurationError(f"{what}: {there} is no folder")
    if there not in (folder, folder.parent) and not with_parents:
        raise ConfigurationError(f"{what}: there is no folder {folder.parent}")
    if reason := why_not_writable(there):
        raise ConfigurationError(f"{what}: {reason}")


def _can_listen(host: str, port: int) -> bool:
    """Returns whether a port can be bound at one of a host's addresses at least, which is all that gRPC needs."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        try:
            socket.create_server(address[:2], family=family).close()
        except OSError:
            continue
        return True
    return False


def _write_endpoint(settings: ProviderSettings, port: int, state: StateDir | FrontIdentity | None) -> None:
    """Writes down for `enroll` under which URL tenants will reach this provider; the port is 0 while it is not known.
    This comes before the model is loaded, since tenants are enrolled meanwhile."""
    if state is None:
        return
    reachable = settings.host
    if settings.certificate_names:
        reachable = settings.certificate_names[0]
    elif reachable in ("0.0.0.0", "::", "[::]"):  # noqa: S104 - compared with, not bound to
        reachable = socket.gethostname()
    (state.path / ENDPOINT_FILE).write_text(_url(True, reachable, port) + "\n")


def _announce(settings: ProviderSettings, port: int) -> None:
    if settings.ipc is not None:
        _LOGGER.info("tenants on this host: ipc:%s", settings.ipc.absolute())
    print(f"ready {_url(settings.tls, settings.host, port)}", flush=True)


def _url(tls: bool, host: str, port: int) -> str:
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'grpcs' if tls else 'grpc'}://{bracketed}:{port}"
