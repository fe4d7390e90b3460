"""Tests which folders a tenant accepts as a provider's, by their owner and by who could replace them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from wire.errors import ConfigurationError, Unavailable, VeilbaseError
from wire.transport.ipc.folder import SOCKET_NAME, check_folder, check_socket

IS_ROOT = os.geteuid() == 0
OTHER_UID = 65_534
root_only = pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "parent" / "ipc"
    made.mkdir(0o711, parents=True)
    made.parent.chmod(0o755)
    made.chmod(0o711)
    return made


def listen(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET_NAME))
    return listener


def test_a_folder_of_ones_own_is_taken(folder: Path) -> None:
    assert check_folder(folder) == check_folder(folder, os.geteuid()) == os.geteuid()
    with listen(folder):
        assert check_socket(folder, os.geteuid()) == str(folder / SOCKET_NAME)


def linked_folder(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder)
    return folder.parent / "link"


def linked_parent(folder: Path) -> Path:
    (folder.parent.parent / "link").symlink_to(folder.parent)
    return folder.parent.parent / "link" / "ipc"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def open_to(place: str, mode: int) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        (folder if place == "folder" else folder.parent).chmod(mode)
        return folder

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: folder / "none", "there is no folder .*none: name the one"),
        (linked_folder, "leads over a symbolic link, which could be changed: name .*/parent/ipc$"),
        (linked_parent, "leads over a symbolic link, which could be changed: name .*/parent/ipc$"),
        (a_file, "is no folder"),
        (lambda folder: folder / ("x" * 120), "at most 107 bytes, got "),
        (open_to("folder", 0o733), "ipc can be written to by other users"),
        (open_to("folder", 0o771), "ipc can be written to by other users"),
        (open_to("folder", 0o1777), "ipc can be written to by other users"),
        (open_to("parent", 0o757), "parent can be written to by other users, who could replace .*ipc"),
        (open_to("parent", 0o775), "parent can be written to by other users, who could replace .*ipc"),
    ],
)
def test_a_folder_that_others_could_replace_is_refused(folder: Path, change: Callable[[Path], Path], text: str) -> None:
    named = change(folder)
    with pytest.raises(ConfigurationError, match=text) as caught:
        check_folder(named)
    assert "\n" not in str(caught.value)


def test_a_sticky_parent_is_taken_for_ones_own_folder(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert check_folder(folder) == os.geteuid()


def test_a_folder_of_another_user_than_expected_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"user {os.geteuid() + 1}, got {os.geteuid()}"):
        check_folder(folder, os.geteuid() + 1)


@root_only
def test_a_folder_that_a_stranger_made_in_a_sticky_one_has_to_be_expected(folder: Path) -> None:
    """In a sticky folder such as /tmp, any user can make a folder with the provider's name first. So another user's
    folder there is accepted only if the tenant names this user."""
    folder.parent.chmod(0o1777)
    os.chown(folder, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigurationError, match=f"say so with peer_uid={OTHER_UID}"):
        check_folder(folder)
    assert check_folder(folder, OTHER_UID) == OTHER_UID
    folder.parent.chmod(0o755)
    assert check_folder(folder) == OTHER_UID


@root_only
def test_a_parent_of_a_third_user_is_refused(folder: Path) -> None:
    os.chown(folder.parent, OTHER_UID, OTHER_UID)
    with pytest.raises(ConfigurationError, match=f"parent belongs to user {OTHER_UID}, who could replace"):
        check_folder(folder)


@pytest.mark.parametrize("what", ["nothing", "file", "link", "folder"])
def test_what_is_no_socket_is_refused(folder: Path, what: str) -> None:
    path, kind = folder / SOCKET_NAME, ConfigurationError if what != "nothing" else Unavailable
    if what == "file":
        path.touch()
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        (folder / "real").mkdir()
        listen(folder / "real").close()
        path.symlink_to(folder / "real" / SOCKET_NAME)
    with pytest.raises(VeilbaseError) as caught:
        check_socket(folder, os.geteuid())
    assert type(caught.value) is kind


@root_only
def test_a_socket_of_another_user_is_refused(folder: Path) -> None:
    with listen(folder):
        os.chown(folder / SOCKET_NAME, OTHER_UID, OTHER_UID)
        with pytest.raises(ConfigurationError, match=f"belong to user {os.geteuid()}, as its folder does"):
            check_socket(folder, os.geteuid())
