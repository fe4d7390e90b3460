"""This module says what happens when an endpoint cannot write to its disk, for example because the disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from noise.disk.private_files import FILE_MODE
from tenant_sdk.endpoint.errors import HttpError


@contextlib.contextmanager
def storing(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Runs code that writes files for a request. If anything in it fails, `undo` removes what was written.

    Raises:
        HttpError: a file cannot be written; the status is 507.
    """
    try:
        yield
    except OSError as exc:
        undo()
        raise HttpError(507, f"the server cannot store this: {exc.strerror}", "not_stored") from None
    except BaseException:
        undo()
        raise


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes a hard link to a file, or a copy with mode 0600 if no link can be made. The file must not change
    afterwards, since a link shares its contents.

    Raises:
        OSError: neither is possible.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        target.chmod(FILE_MODE)
