"""Runs in a shard's process: maps the shard's weights, and computes products of rows in shared memory.

The process gets messages only from the provider's process that started it, the front. Their socket is in a folder that
only this user can open. The process ends when its pipe to the front is closed. It ignores SIGINT, SIGTERM and SIGHUP,
since the front handles them.
"""

from __future__ import annotations

import logging
import signal
import sys

import torch
import zmq

from provider.device.choice import choose
from provider.engine import products
from provider.engine.replica import Product, ReplicaLost
from provider.model.served_group import ServedGroup
from provider.operations.logs import configure
from provider.shards import messages
from provider.shards.messages import SharedRows, read_weights
from wire.errors import UnknownLayer, VeilbaseError, WireCode, code_of
from wire.frame import DTYPES, Call, Header, Purpose
from wire.ring.seeded_rows import Rows, SeededRows

_LOGGER = logging.getLogger(__name__)


class Worker:
    """Computes the products that the front (the provider's process) requests, one message at a time."""

    def __init__(self, product: Product, request_rows: SharedRows, reply_rows: SharedRows) -> None:
        """Keeps the function that computes products, and the two shared memories: for rows from the front, and for
        replies to the front."""
        self._multiply, self._requests, self._replies = product, request_rows, reply_rows

    def answer(self, parts: list[bytes]) -> list[bytes]:
        """Computes the product that a message requests, writes the product to the shared memory, and returns the
        reply's message. If the product fails, returns a message with the error's code.

        Raises:
            MalformedFrame: the message is not one of `control.request`.
            ReplicaLost: the device of this process is lost.
        """
        header, request_bytes, reply_bytes, seed = messages.read_request(parts)
        try:
            self._requests.follow(request_bytes)
            self._replies.follow(reply_bytes)
            product = self._product(header, seed)
            self._replies.view(product.shape[0], product.shape[1], product.dtype).copy_(product)
            return messages.reply(header.request_id)
        except VeilbaseError as exc:
            return messages.reply(header.request_id, code_of(exc))
        except ReplicaLost:
            raise
        except Exception as exc:  # noqa: BLE001 - out of memory, a broken kernel: the type only, a text may hold values
            _LOGGER.error("a product of group %d failed: %s", header.call.group, type(exc).__name__)
            return messages.reply(header.request_id, WireCode.INTERNAL)

    def _product(self, header: Header, seed: bytes) -> torch.Tensor:
        call = header.call
        rows: Rows
        if call.purpose is Purpose.HINT:
            rows = SeededRows.unpack(seed)
        else:
            rows = self._requests.view(header.rows, header.cols, DTYPES[call.arithmetic])
        return self._multiply(call, rows)


def product_of(groups: dict[int, ServedGroup], device: torch.device | None) -> Product:
    """Returns a function that multiplies rows by the weight of one of these layer groups. It computes on the
    accelerator `device`, or on the CPU if `device` is None."""
    if device is not None:
        from provider.device.on_device import OnDevice

        return OnDevice(list(groups.values()), device).product

    def on_cpu(call: Call, rows: Rows) -> torch.Tensor:
        group = groups.get(call.group)
        if group is None:
            raise UnknownLayer("this shard does not hold that group")
        return products.product(group, call, rows)

    return on_cpu


def main(arguments: list[str]) -> None:
    """Runs the shard's process until the front (the provider's process that started this one) ends.

    Args:
        arguments: the address of the front's socket; the format of the log; the setting of the device and the number of
            this process; the file descriptors of the weights, of the shared rows and of the shared replies; and the
            number of threads.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    address, log_format, device, *numbers = arguments
    index, weights, requests, replies, threads = map(int, numbers)
    configure("json" if log_format == "json" else "text")
    torch.set_num_threads(threads)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        try:
            groups = read_weights(weights)
            product = product_of(groups, choose(device, index, list(groups.values())))
            worker = Worker(product, SharedRows(requests), SharedRows(replies))
        except VeilbaseError as exc:
            sys.exit(f"provider: {exc}")
        socket.send_multipart(messages.READY)
        try:
            _serve(worker, socket)
        except ReplicaLost:
            sys.exit("provider: the device of this process is lost")
        socket.setsockopt(zmq.LINGER, 0)


def _serve(worker: Worker, socket: zmq.Socket[bytes]) -> None:
    front = sys.stdin.fileno()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(front, zmq.POLLIN)  # Nothing is written to this pipe, so it is readable only when it is closed.
    while True:
        ready = dict(poller.poll())
        if front in ready:
            return
        socket.send_multipart(worker.answer(socket.recv_multipart()))


if __name__ == "__main__":
    main(sys.argv[1:])
