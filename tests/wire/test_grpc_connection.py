"""Tests what gRPC's end of a connection hands on: errors of this project, and nothing of gRPC's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from wire.errors import NotPermitted, QuotaExceeded, Unauthenticated, Unavailable, VeilbaseError
from wire.transport.grpc_connection import GrpcStream


class Status(grpc.RpcError):
    """Is the error with which gRPC ends a stream."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        super().__init__("a text of the peer")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Channel:
    """Stands in for a channel whose stream gives the messages, and then ends or raises."""

    def __init__(self, *messages: bytes | Status) -> None:
        self._messages = messages

    def stream_stream(self, method: str, **_: Any) -> Any:
        def answers(sent: Iterator[bytes], **_: Any) -> Iterator[bytes]:
            for message in self._messages:
                if isinstance(message, Status):
                    raise message
                yield message

        return answers


def ended_by(status: Status, *before: bytes, accepted_before: bool = False) -> VeilbaseError:
    """Returns the error that a stream ends with after some messages."""
    stream = GrpcStream(Channel(*before, status), "/method", accepted_before)  # type: ignore[arg-type]
    assert [stream.step() for _ in before] == list(before)
    with pytest.raises(VeilbaseError) as caught:
        stream.step()
    return caught.value


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, NotPermitted),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QuotaExceeded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
    ],
)
def test_a_stream_that_gRPC_ends_raises_an_error_of_the_tree(code: grpc.StatusCode, kind: type[VeilbaseError]) -> None:
    error = ended_by(Status(code))
    assert type(error) is kind
    assert "a text of the peer" not in str(error)
    assert error.__context__ is error.__cause__ is None, "gRPC's error keeps the call, and texts of the peer"


def test_a_connection_that_is_cut_refuses_nobody_who_was_accepted() -> None:
    """Whoever got a message on the stream, or an earlier stream, has been accepted by the provider."""
    cut = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert type(ended_by(cut)) is Unauthenticated
    assert type(ended_by(cut, b"WELCOME")) is Unavailable
    assert type(ended_by(cut, accepted_before=True)) is Unavailable


def test_a_stream_that_ends_properly() -> None:
    stream = GrpcStream(Channel(b"last"), "/method")  # type: ignore[arg-type]
    assert stream.step() == b"last"
    with pytest.raises(EOFError):
        stream.step()


def test_the_multiplexer_and_sockets_of_one_host_load_no_grpc() -> None:
    code = "import sys; import wire.transport.ipc.connection; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout == "False\n", done.stderr[-500:]
