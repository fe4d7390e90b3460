"""Runs `provider shard --join`, which makes this host a replica of a shard of a provider on another host.

Guarantees: this host opens the connection, so it needs no port. It computes only with groups whose weights have the
same digests at both ends. If the connection breaks, this host joins again.
"""

from __future__ import annotations

import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import torch

from provider.config import ShardSettings
from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.shards.messages import JOINED, SHARD_METHOD, Assignment, Join, Ready, pack, unpack
from wire import frame
from wire.errors import (
    ConfigurationError,
    MalformedFrame,
    NotPermitted,
    Unauthenticated,
    VeilbaseError,
    WireCode,
    code_of,
)
from wire.frame import PROTOCOL_VERSION, Assembler, FrameType, Header, check_tensor_header
from wire.limits import Limits
from wire.transport.grpc_connection import open_channel, translate_status
from wire.transport.identity import TlsIdentity, load_identity

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 30.0
_MOST = Limits(max_rows=1 << 24, max_tensor_bytes=1 << 32)
"""Limits of one request; the provider has already checked each request against its own limits."""
_LOGGER = logging.getLogger(__name__)
Load = Callable[[Assignment], dict[int, ServedGroup]]


class JoiningShard:
    """Joins a provider as a replica of a shard, and computes products for the provider. `run` ends only with an error
    or after `stop`."""

    def __init__(self, url: str, identity: TlsIdentity | None, shard: int, load: Load) -> None:
        """Keeps the settings, and connects to nothing yet.

        Args:
            url: the provider's URL.
            identity: this host's certificate and key; None uses no TLS, and providers then refuse shards.
            shard: the number of the shard of which this host becomes a replica.
            load: loads the layer groups that the provider assigns, and returns them by id; called once.
        """
        self._url, self._identity, self._shard, self._load = url, identity, shard, load
        self._groups: dict[int, ServedGroup] | None = None
        self._fingerprints: dict[int, str] = {}
        self._stopping = threading.Event()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.on_joined: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Joins the provider, and joins again whenever the connection is lost.

        Raises:
            ConfigurationError: the weights differ from the provider's, the provider does not have this shard, or the
                URL is not valid.
            AccessError: the provider refuses the certificate.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._join()
            except (Unauthenticated, NotPermitted, ConfigurationError):
                raise
            except VeilbaseError as exc:
                _LOGGER.warning("no provider at %s (%s); trying again", self._url, type(exc).__name__)
            if time.monotonic() - began > _LAST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def stop(self) -> None:
        """Makes `run` return after the present product."""
        self._stopping.set()
        self._outgoing.put(None)

    def _join(self) -> None:
        self._outgoing = queue.SimpleQueue()
        self._outgoing.put(pack(Join(protocol=PROTOCOL_VERSION, shard=self._shard)))
        with open_channel(self._url, self._identity) as channel:
            messages = channel.stream_stream(SHARD_METHOD)(iter(self._outgoing.get, None))
            is_joined = False
            try:
                groups = self._hold(unpack(Assignment, next(messages)))
                self._outgoing.put(pack(Ready(digests={one: self._fingerprints[one] for one in groups})))
                if next(messages) != JOINED:
                    raise MalformedFrame("expected to be joined")
                is_joined = True
                self.on_joined()
                self._serve(groups, messages)
            except StopIteration:
                pass
            except grpc.RpcError as exc:  # `from None`: the original shows text of the peer
                if exc.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    raise ConfigurationError(f"the provider has no shard {self._shard}, or takes none") from None
                if exc.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    raise ConfigurationError("the provider holds other weights, or is another release") from None
                raise translate_status(exc, is_joined) from None
            finally:
                messages.cancel()

    def _hold(self, assignment: Assignment) -> dict[int, ServedGroup]:
        """Returns the assigned groups by id; the first call loads the model.

        Raises:
            ConfigurationError: this host's weights differ from the provider's.
        """
        if self._groups is None:
            self._groups = self._load(assignment)
            self._fingerprints = {one: group.fingerprint() for one, group in self._groups.items()}
        groups = self._groups
        for group, digest in assignment.digests.items():
            if self._fingerprints.get(group) != digest:
                raise ConfigurationError(
                    f"this host's weights of group {group} are not the provider's ({assignment.model_id}, "
                    f"{assignment.weights}): --model, --weights and --base-layers must be the same"
                )
        return {group: groups[group] for group in assignment.digests}

    def _serve(self, groups: dict[int, ServedGroup], messages: Iterator[bytes]) -> None:
        assembler: Assembler | None = None
        for message in messages:
            header, payload = frame.parse(message)
            if header.kind is not FrameType.REQUEST or header.call.group not in groups:
                raise MalformedFrame("expected a request for a group of this shard")
            if assembler is None:
                check_tensor_header(header, _MOST.max_rows, _MOST.max_tensor_bytes)
                assembler = Assembler(header)
            if assembler.add(header, payload):
                self._answer(groups[header.call.group], assembler)
                assembler = None
            if self._stopping.is_set():
                return

    def _answer(self, group: ServedGroup, assembler: Assembler) -> None:
        asked = assembler.header
        try:
            reply = products.product(group, asked.call, assembler.rows())
        except VeilbaseError as exc:
            self._refuse(asked.request_id, code_of(exc))
            return
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel: the type only
            _LOGGER.error("a product of group %d failed: %s", asked.call.group, type(exc).__name__)
            self._refuse(asked.request_id, WireCode.INTERNAL)
            return
        size = reply.numel() * frame.ITEM_BYTES
        header = Header(FrameType.REPLY, asked.request_id, asked.call, reply.shape[0], reply.shape[1], 0, size)
        for message in frame.frames(header, frame.tensor_bytes(reply)):
            self._outgoing.put(bytes(message))

    def _refuse(self, request_id: int, code: int) -> None:
        self._outgoing.put(Header(FrameType.ERROR, request_id, code=code).pack())


def load_groups(model: str, weights: str, base_layers: str | None, assignment: Assignment) -> dict[int, ServedGroup]:
    """Loads a model and returns its assigned groups by id; see `provider.model.weights.serve_model` for errors."""
    from provider.model.load import load, resolve
    from provider.model.weights import return_freed_memory, serve_model

    served = serve_model(load(resolve(model)), "native" if weights == "native" else "int8", base_layers)
    served.bundle.close()
    kept = {one.info.id: one for one in served.groups if one.info.id in assignment.digests}
    del served
    return_freed_memory()
    return kept


def run_shard(settings: ShardSettings) -> None:
    """Runs `provider shard` until SIGTERM or SIGINT; see `JoiningShard.run` and `load_groups` for errors."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    def load(assignment: Assignment) -> dict[int, ServedGroup]:
        return load_groups(settings.model, settings.weights, settings.base_layers, assignment)

    joining = JoiningShard(settings.join, load_identity(settings.identity, "--shard"), settings.shard, load)
    joining.on_joined = lambda: print(f"ready shard {settings.shard}", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    joining.run()
