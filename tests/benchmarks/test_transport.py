"""Tests that the transport benchmark reports what it measured."""

from __future__ import annotations

import pytest

from benchmarks.transport import KINDS, check_carriers

HONEST = {name: name.rpartition("by ")[2] if ", by " in name else "tensor port 4711" for name in KINDS}


def test_streams_that_were_carried_as_their_names_say() -> None:
    check_carriers(dict(HONEST))


@pytest.mark.parametrize(
    ("name", "carrier"),
    [
        ("real", "gRPC"),
        ("real", "ipc"),
        ("real, by ipc", "tensor port 1"),
        ("identity, by gRPC", "tensor port 1"),
        ("real", None),
    ],
)
def test_figures_of_another_carrier_are_not_given_out(name: str, carrier: str | None) -> None:
    with pytest.raises(RuntimeError, match=f"{name!r} are of a stream that was carried by {carrier}"):
        check_carriers({**HONEST, name: carrier})
