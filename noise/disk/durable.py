"""This module makes new files of the ledger and the hint store survive a crash."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, so that they survive a crash. A file's own fsync does not cover its
    name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
