"""This module lets a fine-tuning run wait for a provider that went away, and go on when the provider is back.

Guarantees: no request that broke is sent again. The run goes on from its last checkpoint, as after a new start, and
every row gets a new mask. A run that failed otherwise is not continued: only a failed connection is waited for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from tenant_sdk.warn import warn_and_go_on
from wire.errors import ForkedConnection, QuotaExceeded, TransportError
from wire.transport.retry import with_jitter

WAIT_S = 600.0
"""The seconds for which a run waits by default: a provider with a large model may take minutes to start."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0
"""The seconds between two tries to reach the provider: the first pause, which doubles, and the longest."""
_CHECK_S = 0.25
"""The most seconds of a pause between two calls of `check`."""

_AWAY = (TransportError, QuotaExceeded)
"""The errors that are waited for. A provider counts a stream that has just broken for half a minute, and may refuse
another one meanwhile (QuotaExceeded)."""

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

    Only waits count towards `wait_s`, not the steps that an attempt makes again. A provider that comes back and goes
    away again, before the run has made a step more than ever, has what is left of the time.

    Args:
        attempt: runs from the last checkpoint to the end.
        session: the tenant's session.
        wait_s: the most seconds to wait, after which one try to reach the provider may still be under way; 0 for no
            wait.
        num_steps: returns the number of optimizer steps that the newest attempt has reached.
        check: called every quarter of a second during a wait, but not while the session connects; it may raise an error
            to end the run.

    Raises:
        TransportError, QuotaExceeded: the provider was not back in time, or did not take this tenant back in time.
        VeilbaseError: the run failed otherwise, or the provider that is back serves another model.
    """
    left_s, most_steps, pause_s = 0.0, -1, _FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except ForkedConnection:
            raise
        except _AWAY:
            if num_steps() > most_steps:
                left_s, most_steps, pause_s = wait_s, num_steps(), _FIRST_PAUSE_S
            if left_s <= 0:
                raise
        # outside `except`: the error's frames hold the model and a batch, whose memory the next attempt needs
        gc.collect()
        warn_and_go_on(
            f"the connection to the provider failed: this run waits for it, up to {left_s:.0f} s, and goes on from its "
            "last checkpoint",
            ProviderAwayWarning,
        )
        began = time.monotonic()
        pause_s = _wait(session, began + left_s, pause_s, check)
        left_s -= time.monotonic() - began


def _wait(session: Reconnects, give_up_at: float, pause_s: float, check: Callable[[], None]) -> float:
    """Waits until the provider can be reached. Returns the seconds to pause before the next try, if there is another.

    There is a pause before the first try, since a provider that refuses at once must not be asked without end.
    """
    while True:
        _pause(min(with_jitter(pause_s), give_up_at - time.monotonic()), check)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        try:
            session.reconnect()
        except _AWAY:
            if time.monotonic() >= give_up_at:
                raise
        else:
            return pause_s


def _pause(pause_s: float, check: Callable[[], None]) -> None:
    end = time.monotonic() + pause_s
    while (left_s := end - time.monotonic()) > 0:
        check()
        time.sleep(min(left_s, _CHECK_S))
