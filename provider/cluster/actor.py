"""Runs in an actor's process on a host of the cluster: loads a shard's weights by the model's name, and computes
products.

Guarantees: the actor computes only with groups whose weights have the digests that the provider's process sent. It
raises no error of its own to the provider: errors come back as codes, so that no text with values crosses.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from provider.engine import products
from provider.model.served_group import ServedGroup
from wire import frame
from wire.errors import ConfigurationError, UnknownLayer, VeilbaseError, WireCode, code_of
from wire.frame import DTYPES, PROTOCOL_VERSION, Purpose
from wire.ring.seeded_rows import Rows, SeededRows

_LOOK_S = 1.0
"""The seconds between two looks at whether this host's Ray node still runs."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """Says which groups an actor holds.

    Attributes:
        model, weights, base_layers: the settings of the provider's process by which an actor loads the model.
        digests: each group's `ServedGroup.fingerprint`, by group id.
        threads: the threads of the actor's arithmetic; None leaves the number to torch.
        protocol: the protocol version of the provider's process.
    """

    model: str
    weights: str
    base_layers: str | None
    digests: Mapping[int, str]
    threads: int | None
    protocol: int = PROTOCOL_VERSION


class ShardActor:
    """Computes products with a shard's weights. If its process or host is lost, Ray starts it again, with the same
    arguments."""

    def __init__(self, assignment: Assignment) -> None:
        """Loads the groups of the assignment. What is wrong with them is kept for `refusal`."""
        self._groups: dict[int, ServedGroup] = {}
        self._refusal = ""
        self._lock = threading.Lock()  # for `_is_asked_again`
        self._is_asked_again = threading.Event()
        threading.Thread(target=_end_with_node, args=(os.getppid(),), name="veilbase-node", daemon=True).start()
        if assignment.threads is not None:
            torch.set_num_threads(assignment.threads)
        try:
            self._groups = _load(assignment)
        except VeilbaseError as exc:
            self._refusal = str(exc)
        except Exception as exc:
            _LOGGER.exception("the model could not be loaded")
            self._refusal = (
                f"a host of the cluster could not load the model ({type(exc).__name__}): see Ray's logs there"
            )

    def refusal(self) -> str:
        """Returns why this actor computes nothing, in one line; an empty text if it does compute."""
        return self._refusal

    def wait_for_ever(self) -> None:
        """Waits until this method is called again; returns at once if this actor computes nothing, since Ray may have
        started it again after the call of `refusal`.

        The provider's process learns from the end of this call that the actor has ended. After it has lost sight of the
        actor for a moment, it calls this method again. The earlier call then returns, so that it does not occupy one of
        the actor's few threads.
        """
        if self._refusal:
            return
        asked_again = threading.Event()
        with self._lock:  # Otherwise two calls at once could wait for the same event, and both threads would be kept.
            before, self._is_asked_again = self._is_asked_again, asked_again
        before.set()
        asked_again.wait()

    def product(self, packed_header: bytes, payload: bytes) -> bytes | int:
        """Computes one product. Arguments and result are bytes, since Ray takes much longer for an array of one row.

        Args:
            packed_header: a REQUEST header with the call and the shape of the rows.
            payload: the rows' little-endian elements; or the 48 bytes of a seed of rows if the call is for a hint.

        Returns:
            The product's elements, or the number of an error of `wire.errors.WireCode`.
        """
        header = frame.parse(packed_header)[0]
        call = header.call
        try:
            group = self._groups.get(call.group)
            if group is None:
                raise UnknownLayer("this actor does not hold that group")
            rows: Rows
            if call.purpose is Purpose.HINT:
                rows = SeededRows.unpack(payload)
            else:
                # A copy: Ray's own memory is read-only.
                elements = torch.frombuffer(bytearray(payload), dtype=DTYPES[call.arithmetic])
                rows = elements.view(header.rows, header.cols)
            reply: bytes = products.product(group, call, rows).contiguous().numpy().tobytes()
        except VeilbaseError as exc:
            return int(code_of(exc))
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel: the type only, a text may hold values
            _LOGGER.error("a product of group %d failed: %s", call.group, type(exc).__name__)
            return int(WireCode.INTERNAL)
        return reply


def _end_with_node(node: int) -> None:
    """Ends this process when the Ray node that started it, its parent process, has ended. Ray ends its workers itself,
    but a worker whose node was killed was seen to stay, with the weights in its memory."""
    while os.getppid() == node:
        time.sleep(_LOOK_S)
    os._exit(1)


def _load(assignment: Assignment) -> dict[int, ServedGroup]:
    """Loads the model and returns the assigned groups by id.

    Raises:
        ConfigurationError: this host has another release or other weights, or cannot load the model.
    """
    from provider.model.load import load, resolve
    from provider.model.weights import return_freed_memory, serve_model

    if assignment.protocol != PROTOCOL_VERSION:
        raise ConfigurationError(
            f"a host of the cluster speaks protocol {PROTOCOL_VERSION}, the provider {assignment.protocol}: install "
            "the same release everywhere"
        )
    served = serve_model(
        load(resolve(assignment.model)),
        "native" if assignment.weights == "native" else "int8",
        assignment.base_layers,
    )
    served.bundle.close()
    kept = {one.info.id: one for one in served.groups if one.info.id in assignment.digests}
    del served
    return_freed_memory()
    for group, digest in assignment.digests.items():
        if group not in kept or kept[group].fingerprint() != digest:
            raise ConfigurationError(
                f"a host of the cluster has other weights of group {group} than the provider: {assignment.model!r} "
                "must be the same checkpoint everywhere"
            )
    return kept
