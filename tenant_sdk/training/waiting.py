"""This module lets a fine-tuning run wait for a provider that went away, and go on when the provider is back.

Guarantees: no request that broke is sent again. The run goes on from its last checkpoint, as after a new start, and
every row gets a new mask. A run that failed otherwise is not continued: only a failed connection is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from tenant_sdk.warn import warn_and_go_on
from wire.errors import ForkedConnection, TransportError
from wire.transport.retry import with_jitter

WAIT_S = 600.0
"""The seconds for which a run waits by default: a provider with a large model may take minutes to start."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0
"""The seconds between two tries to reach the provider: the first pause, which doubles, and the longest."""
_CHECK_S = 0.25
"""The most seconds of a pause between two calls of `check`."""

_Result = TypeVar("_Result")


class ProviderAwayWarning(UserWarning):
    """Warns that a run waits for its provider, to which the connection failed."""


class Reconnects(Protocol):
    """Describes a session that can open its connections again."""

    def reconnect(self) -> None:
        """Opens connections that are broken; raises TransportError if a provider cannot be reached."""


def with_waits(
    attempt: Callable[[], _Result],
    session: Reconnects,
    wait_s: float,
    num_steps: Callable[[], int],
    check: Callable[[], None] = lambda: None,
) -> _Result:
    """Returns what `attempt` returns. After a failed connection it waits for the provider and calls `attempt` again.

    The time limit starts anew at a failure only if the run has reached a later step than at any failure before.

    Args:
        attempt: runs from the last checkpoint to the end.
        session: the tenant's session.
        wait_s: the most seconds from the first failure to the last try; 0 for no wait.
        num_steps: returns the number of optimizer steps that the newest attempt has reached.
        check: called every quarter of a second during a wait; it may raise an error to end the run.

    Raises:
        TransportError: the provider was not back in time; or at once, as ForkedConnection, if this process is a fork
            of the one that opened the connection.
        VeilbaseError: the run failed otherwise, or the provider that is back serves another model.
    """
    give_up_at, most_steps, pause_s = 0.0, -1, _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except ForkedConnection:
            raise
        except TransportError:
            if num_steps() > most_steps:
                give_up_at, most_steps, pause_s = time.monotonic() + wait_s, num_steps(), _FIRST_PAUSE_S
            if time.monotonic() >= give_up_at:
                raise
        # outside `except`: the error's frames hold the model and a batch, whose memory the next attempt needs
        warn_and_go_on(
            f"the connection to the provider failed: this run waits for it, up to "
            f"{max(0.0, give_up_at - time.monotonic()):.0f} s, and goes on from its last checkpoint",
            ProviderAwayWarning,
        )
        pause_s = _wait(session, give_up_at, pause_s, check)


def _wait(session: Reconnects, give_up_at: float, pause_s: float, check: Callable[[], None]) -> float:
    """Waits until the provider can be reached. Returns the seconds to pause before the next try, if there is another.
    Raises TransportError if the provider cannot be reached by `give_up_at`.

    There is a pause before the first try, since a provider that refuses at once must not be asked without end.
    """
    while True:
        _pause(min(with_jitter(pause_s), give_up_at - time.monotonic()), check)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        try:
            session.reconnect()
        except TransportError:
            if time.monotonic() >= give_up_at:
                raise
        else:
            return pause_s


def _pause(pause_s: float, check: Callable[[], None]) -> None:
    end = time.monotonic() + pause_s
    while (left_s := end - time.monotonic()) > 0:
        check()
        time.sleep(min(left_s, _CHECK_S))
