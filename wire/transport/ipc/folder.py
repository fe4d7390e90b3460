"""This module checks the folder in which a provider's socket lies, before anything is sent to the socket.

Guarantees: only root, this process's user and the user who is expected to be the provider can have put the socket where
it is found, or can put another in its place. So nobody else can stand between the two ends, or take the path over while
the provider is stopped. Access control lists are covered, since their widest right shows in the group's bits.

A folder that everybody can write to and that has the sticky bit, such as /tmp, may be among the parents: in it, users
cannot rename or remove what belongs to others. However, any user can make a folder of the expected name there while
none exists. So the next folder on the path has to belong to root, to this process's user or to the user that the tenant
names.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from wire.errors import ConfigurationError, Unavailable

SCHEME = "ipc:"
SOCKET_NAME = "veilbase.sock"
_MOST_PATH_BYTES = 107
"""The most bytes of a socket's path in Linux: `sun_path` has 108, of which the last one is zero (unix(7))."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def check_folder(folder: Path, peer_uid: int | None = None) -> int:
    """Checks a folder and all its parents.

    Args:
        folder: an absolute path.
        peer_uid: the user id to which the folder has to belong; None takes the folder's owner.

    Returns:
        The user id that the provider must have, which is that of the folder's owner.

    Raises:
        ConfigurationError: there is no such folder, a part of its path is a symbolic link, the folder belongs to
            another user, others can write to it or to a parent, the socket's path is too long, or the folder's name
            cannot be printed; or everybody can make files in a parent, and the tenant has not named the user to whom
            the next folder on the path belongs.
    """
    _check_name(str(folder))
    _check_length(folder)
    real = os.path.realpath(folder)
    if real != str(folder):
        raise ConfigurationError(f"{folder} leads over a symbolic link, which could be changed: name {real}")
    status = _look_at(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{folder} is no folder: name the one that `provider serve --ipc` has")
    owner = status.st_uid
    if peer_uid is not None and owner != peer_uid:
        raise ConfigurationError(f"expected {folder} to belong to the provider's user {peer_uid}, got {owner}")
    if status.st_mode & _OTHERS_WRITE:
        raise ConfigurationError(f"{folder} can be written to by other users, who could replace the socket: chmod go-w")
    inner = owner
    for parent in folder.parents:
        inner = _check_parent(folder, parent, (owner, inner), peer_uid)
    return owner


def check_socket(folder: Path, owner: int) -> str:
    """Returns the path of the socket in a folder that `check_folder` has checked.

    Raises:
        Unavailable: there is no socket.
        ConfigurationError: what is there is no socket, or another user's.
    """
    path = folder / SOCKET_NAME
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise Unavailable(f"no provider listens in {folder}: start `provider serve --tls --ipc {folder}`") from None
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be looked at: {exc.strerror}") from exc
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigurationError(f"expected a socket of `provider serve --ipc` at {path}, found something else")
    if status.st_uid != owner:
        raise ConfigurationError(f"expected {path} to belong to user {owner}, as its folder does, got {status.st_uid}")
    return str(path)


def check_listens(folder: Path, peer_uid: int | None = None) -> None:
    """Checks the folder and its socket, and that a process listens at the socket. Nothing is sent.

    Raises:
        ConfigurationError: see `check_folder` and `check_socket`.
        Unavailable: nobody listens.
    """
    path = check_socket(folder, check_folder(folder, peer_uid))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain, contextlib.suppress(BlockingIOError):
        plain.setblocking(False)  # A full backlog is then an error at once, and not a wait without an end.
        connect(plain, path, folder)


def connect(plain: socket.socket, path: str, folder: Path) -> None:
    """Connects a socket that does not block to the provider's socket `path` in `folder`.

    Raises:
        Unavailable: nobody listens.
        BlockingIOError: the provider takes no further connection at the moment.
        ConfigurationError: the socket cannot be used.
    """
    try:
        plain.connect(path)
    except BlockingIOError:
        raise
    except (ConnectionRefusedError, FileNotFoundError):
        raise Unavailable(
            f"no provider listens in {folder}: its socket is left from one that has ended; start it again"
        ) from None
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be used: {exc.strerror}") from None


def folder_of(url: str) -> Path:
    """Returns the absolute path of DIR in `ipc:DIR`; a leading `~` stands for the user's home.

    Raises:
        ConfigurationError: the URL is not of this form, or DIR cannot be a path, cannot be printed in one line, or
            names a user who does not exist.
    """
    text = url.removeprefix(SCHEME)
    if not text or "\0" in text or url == text:
        raise ConfigurationError("expected ipc:DIR, with the folder that `provider serve --ipc DIR` has")
    _check_name(text)
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except RuntimeError as exc:  # There is no such user, and so no home.
        raise ConfigurationError(f"expected ipc:DIR with a folder, got {text!r}") from exc


def _check_name(text: str) -> None:
    """Raises ConfigurationError if a folder's name holds characters that cannot be printed, since errors and the log
    name the folder in one line."""
    if not text.isprintable():
        raise ConfigurationError("expected a folder whose name can be printed in one line: choose another name")


def _check_length(folder: Path) -> None:
    length = len(os.fsencode(folder / SOCKET_NAME))
    if length > _MOST_PATH_BYTES:
        raise ConfigurationError(
            f"expected a socket's path of at most {_MOST_PATH_BYTES} bytes, got {length}: choose a shorter folder"
        )


def _check_parent(folder: Path, parent: Path, owners: tuple[int, int], peer_uid: int | None) -> int:
    """Checks one parent of the folder and returns the parent's owner; raises ConfigurationError if others could change
    it. `owners` holds two user ids: the owner of the folder, and the owner of the next folder on the path from the
    parent to the folder."""
    status, (owner, inner) = _look_at(parent), owners
    if status.st_uid not in (_ROOT, os.geteuid(), owner):
        raise ConfigurationError(f"{parent} belongs to user {status.st_uid}, who could replace {folder}")
    if not status.st_mode & _OTHERS_WRITE:
        return status.st_uid
    if not status.st_mode & stat.S_ISVTX:
        raise ConfigurationError(f"{parent} can be written to by other users, who could replace {folder}: chmod go-w")
    if peer_uid is None and inner not in (_ROOT, os.geteuid()):
        raise ConfigurationError(
            f"anybody can make a folder in {parent}, and {folder} belongs to user {owner}: if that is the provider's, "
            f"say so with peer_uid={owner} (--peer-uid {owner})"
        )
    return status.st_uid


def _look_at(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no folder {path}: name the one that `provider serve --ipc` has on this host"
        ) from None
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be looked at: {exc.strerror}") from exc
