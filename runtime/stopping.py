"""This module decides how Ctrl-C and SIGTERM end a command: with one line on stderr, and status 130 or 143.

Guarantees: while a command is loaded (`at_once`) nothing is open yet, and the process ends at once. An exception would
not do there: packages catch all errors of what they import, go on without it or import it a second time, which fails.
Otherwise the signal raises an exception in the main thread, so that what is open is closed and what was used is saved.
A signal that whoever started the process ignores stays ignored. Not guaranteed: that a signal is noticed before a call
into compiled code has returned, and anything before `told_when_stopped` is entered.

Importing this module loads nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, which shells expect."""
STATUS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: 128 + signal.SIGTERM}
"""The exit status after each signal that ends a command."""
STOPPED = "stopped"
"""What a command says that has nothing more to say."""

_said = [STOPPED]
"""What is said at present; empty once it was said."""


class Terminated(SystemExit):
    """Ends the process after SIGTERM, so that what is open is closed and the last minute of usage is saved."""


@contextlib.contextmanager
def told_when_stopped(program: str) -> Iterator[None]:
    """Ends the process with one line, where Ctrl-C or SIGTERM stops the code in this context.

    By default the system would end the process at once at SIGTERM, and what it used since the last save would be
    missing in its count. A second SIGTERM does end it at once.

    Args:
        program: what the line begins with.

    Raises:
        SystemExit: a signal stopped the code; with the status of `STATUS`.
    """

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(128 + number)

    say_when_stopped(STOPPED)
    try:
        with _handled({signal.SIGTERM: end}):
            yield
    except KeyboardInterrupt:
        _print(program)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as exc:
        if isinstance(exc, Terminated) or exc.code == INTERRUPTED:  # which typer makes of Ctrl-C
            _print(program)
        raise


def say_when_stopped(text: str) -> None:
    """Replaces what is said after the program's name, until the end of `told_when_stopped`."""
    _said[:] = [text]


@contextlib.contextmanager
def at_once(program: str, status: Mapping[signal.Signals, int] = STATUS) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end the process at once, with one line, while the code in this context loads what a
    command needs. Does nothing in a thread other than the main one, where Python allows no handlers.

    Args:
        program: what the line begins with.
        status: the exit status after each signal.
    """

    def end(number: int, _frame: object) -> None:
        tell_stopped(program)
        os._exit(status[signal.Signals(number)])

    with _handled(dict.fromkeys(status, end)):
        yield


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Sets handlers in place of those that are Python's own or of this module; others, of who started the process or
    of a test, stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    ours = {number for number, handler in before.items() if _is_replaced(handler)}
    for number in ours:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _is_replaced(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler) or getattr(handler, "__module__", "") == __name__


def _print(program: str) -> None:
    with contextlib.suppress(OSError, IndexError):
        print(f"{program}: {_said.pop()}", file=sys.stderr, flush=True)


def tell_stopped(program: str) -> None:
    """Writes the line, if it was not written yet. A handler of a signal may call this."""
    # not by print: the signal may have come while something was printed, and a stream is not entered twice
    with contextlib.suppress(OSError, IndexError):
        os.write(2, f"{program}: {_said.pop()}\n".encode())
