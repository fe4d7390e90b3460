"""Shared by the command lines: a folder that can be written to, and one line for an impossible request."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from wire.errors import VeilbaseError


def exit_status(out: Path | None, work: Callable[[], int]) -> int:
    """Returns what `work` returns; 2 for a request that cannot be carried out, with one line on standard error.

    Args:
        out: a folder to make before any work is done; None for none.
        work: does the work and returns the exit status.
    """
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass  # the folder can be written to
        return work()
    except VeilbaseError as exc:
        print(f"error: {exc}", file=sys.stderr)
    except OSError as exc:
        print(f"error: cannot read or write {str(exc.filename or out)[:200]}: {exc.strerror}", file=sys.stderr)
    return 2
