"""Runs the work of a command line. Before that it checks the output folder. A request that is impossible ends with one
line of text. What transformers and PEFT say besides (progress bars, warnings about their own names) is not shown."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from wire.errors import VeilbaseError


def exit_status(out: Path | None, work: Callable[[], int]) -> int:
    """Runs `work` and returns its exit status. If the folder cannot be used, or if `work` raises a VeilbaseError or an
    OSError, prints one line on standard error and returns 2.

    Args:
        out: a folder to make before any work is done; None makes none.
        work: a function that does the work and returns the exit status.
    """
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass  # checks that the folder is writable
        from runtime.loading import quiet_transformers  # loads torch, after what is told without it

        with quiet_transformers():
            return work()
    except VeilbaseError as exc:
        print(f"error: {exc}", file=sys.stderr)
    except OSError as exc:
        print(f"error: cannot read or write {str(exc.filename or out)[:200]}: {exc.strerror}", file=sys.stderr)
    return 2
