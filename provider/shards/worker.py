"""A shard's process: it maps its weights, and makes products of rows in shared memory until the provider's process
ends.

It takes messages only from the process that started it (the front), through a socket in a folder of this user alone. It
ignores signals that stop the front, which acts on them itself; it ends when the pipe to the front does.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping

import torch
import zmq

from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.operations.logs import configure
from provider.shards import control
from provider.shards.shared_rows import SharedRows
from provider.shards.weight_file import read_weights
from wire.errors import UnknownLayer, VeilbaseError, WireCode, code_of
from wire.frame import DTYPES, Header, Purpose
from wire.ring.seeded_rows import Rows, SeededRows

_LOGGER = logging.getLogger(__name__)


class Worker:
    """Answers one message after the other."""

    def __init__(self, groups: Mapping[int, ServedGroup], request_rows: SharedRows, reply_rows: SharedRows) -> None:
        """Args: groups: by id; request_rows, reply_rows: memory whose other ends are the front's."""
        self._groups, self._requests, self._replies = groups, request_rows, reply_rows

    def answer(self, parts: list[bytes]) -> list[bytes]:
        """Returns the reply's message, once the product is where the front will look for it."""
        header, request_bytes, reply_bytes, seed = control.read_request(parts)
        try:
            self._requests.follow(request_bytes)
            self._replies.follow(reply_bytes)
            product = self._product(header, seed)
            self._replies.view(product.shape[0], product.shape[1], product.dtype).copy_(product)
            return control.reply(header.request_id)
        except VeilbaseError as exc:
            return control.reply(header.request_id, code_of(exc))
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel: the type only, a text may hold values
            _LOGGER.error("a product of group %d failed: %s", header.call.group, type(exc).__name__)
            return control.reply(header.request_id, WireCode.INTERNAL)

    def _product(self, header: Header, seed: bytes) -> torch.Tensor:
        call = header.call
        group = self._groups.get(call.group)
        if group is None:
            raise UnknownLayer("this shard does not hold that group")
        rows: Rows
        if call.purpose is Purpose.HINT:
            rows = SeededRows.unpack(seed)
        else:
            rows = self._requests.view(header.rows, header.cols, DTYPES[call.arithmetic])
        return products.product(group, call, rows)


def main(arguments: list[str]) -> None:
    """Runs the process.

    Args:
        arguments: the address of the front, the log's format, file descriptors of weights, requests and replies, and
            the number of threads.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    address, log_format, *numbers = arguments
    weights, requests, replies, threads = map(int, numbers)
    configure("json" if log_format == "json" else "text")
    torch.set_num_threads(threads)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        try:
            worker = Worker(read_weights(weights), SharedRows(requests), SharedRows(replies))
        except VeilbaseError as exc:
            sys.exit(f"provider: {exc}")
        socket.send_multipart(control.READY)
        _serve(worker, socket)
        socket.setsockopt(zmq.LINGER, 0)


def _serve(worker: Worker, socket: zmq.Socket[bytes]) -> None:
    front = sys.stdin.fileno()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(front, zmq.POLLIN)  # Nothing is ever written to it, so that it becomes readable when it ends.
    while True:
        ready = dict(poller.poll())
        if front in ready:
            return
        socket.send_multipart(worker.answer(socket.recv_multipart()))


if __name__ == "__main__":
    main(sys.argv[1:])
