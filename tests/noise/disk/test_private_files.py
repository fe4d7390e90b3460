"""Tests that folders and files can be read only by their owner, under any umask."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noise.disk.private_files import (
    is_in_memory,
    make_private,
    make_private_folder,
    take_over_rights,
    write_private,
)
from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from tests.support.exact_hints import Provider, exact_hint
from tests.support.files import mode, umask_of

OTHER_GROUP = 54321
ACL = "system.posix_acl_access"
NO_ID = 2**32 - 1


@pytest.fixture(params=[0, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    with umask_of(request.param):
        yield


def test_a_new_folder_and_its_new_parents(tmp_path: Path, umask: None) -> None:
    make_private_folder(tmp_path / "outer" / "inner")
    assert [mode(tmp_path / name) for name in ("outer", "outer/inner")] == [0o700, 0o700]
    make_private_folder(tmp_path / "outer" / "inner")


def test_what_is_there_keeps_its_mode(tmp_path: Path, umask: None) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o751)
    make_private_folder(there / "new")
    make_private_folder(there)
    assert (mode(there), mode(there / "new")) == (0o751, 0o700)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("thesis")
    with pytest.raises(OSError, match="exists"):
        make_private_folder(tmp_path / "file")
    with pytest.raises(OSError, match=r"exists|directory"):
        make_private_folder(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "thesis"


def test_a_folder_is_never_open_on_the_way(tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's mode must be right from its first moment, since a descriptor that another user opens then would stay
    valid."""
    seen: list[int] = []
    made = Path.mkdir

    def mkdir(self: Path, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        seen.append(mode(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    make_private_folder(tmp_path / "outer" / "inner")
    assert len(seen) == 2
    assert all(each & 0o077 == 0 for each in seen)


def test_a_file_new_or_not(tmp_path: Path, umask: None) -> None:
    path = tmp_path / "file"
    write_private(path, "a long text")
    assert (mode(path), path.read_text()) == (0o600, "a long text")
    path.chmod(0o644)
    write_private(path, "short")
    assert (mode(path), path.read_text()) == (0o600, "short")


def test_a_folder_that_others_have_filled(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for path in (folder / "one", folder / "below" / "two", tmp_path / "elsewhere"):
        path.write_text("x")
        path.chmod(0o666)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    make_private(folder)
    assert [mode(folder), mode(folder / "below")] == [0o700, 0o700]
    assert [mode(folder / "one"), mode(folder / "below" / "two")] == [0o600, 0o600]
    assert mode(tmp_path / "elsewhere") == 0o666


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Makes a shared folder, and a private one that is to replace it."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "both").write_text(folder.name)
    (new / "only").write_text("new")
    make_private(new)
    old.chmod(0o750)
    (old / "both").chmod(0o440)
    return old, new


def test_rights_are_taken_over(tmp_path: Path) -> None:
    old, new = pair(tmp_path)
    os.utime(old, (0, 0))
    os.utime(old / "both", (0, 0))
    take_over_rights(old, new)
    assert mode(new) == 0o750
    assert mode(new / "both") == 0o640, "its owner has to be able to write it"
    assert mode(new / "only") == 0o600
    assert (new / "both").read_text() == "new"
    assert min(new.stat().st_mtime, (new / "both").stat().st_mtime) > 1, "the time is that of the new one"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_the_group_is_taken_over(tmp_path: Path) -> None:
    old, new = pair(tmp_path)
    os.chown(old, -1, OTHER_GROUP)
    take_over_rights(old, new)
    assert (new.stat().st_gid, mode(new)) == (OTHER_GROUP, 0o750)


def test_what_cannot_have_the_group_stays_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new folder cannot get the old one's group, it must not get the group's rights either. With mode 0750
    another group would have them."""
    old, new = pair(tmp_path)
    found = Path.stat

    def of_another_group(self: Path, **options: Any) -> os.stat_result:
        had = found(self, **options)
        if "old" not in self.parts:
            return had
        return os.stat_result([OTHER_GROUP if place == 5 else each for place, each in enumerate(had[:10])])

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "stat", of_another_group)
    monkeypatch.setattr(os, "chown", refused)
    take_over_rights(old, new)
    assert [mode(new), mode(new / "both")] == [0o700, 0o600]


def test_an_access_control_list_is_taken_over(tmp_path: Path) -> None:
    """An access control list is copied as well. The mode's group bits show the list's mask, so without the list they
    would let the group in."""
    old, new = pair(tmp_path)
    # The format is that of Linux, include/uapi/linux/posix_acl_xattr.h: version 2, then (tag, rights, id) of the owner,
    # a user, the group, the mask, and others.
    entries = [(1, 7, NO_ID), (2, 5, 12345), (4, 0, NO_ID), (16, 5, NO_ID), (32, 0, NO_ID)]
    given = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(old, ACL, given)
    except OSError:
        pytest.skip("this file system has no access control lists")
    assert mode(old) == 0o750
    take_over_rights(old, new)
    assert os.getxattr(new, ACL) == given


@pytest.mark.parametrize("umask", [0, 0o022], ids=oct, indirect=True)
def test_ledger_and_hints_under_any_umask(tmp_path: Path, umask: None) -> None:
    Ledger.open(tmp_path / "a" / "identity" / "ledger", "acme").close()
    Provider(exact_hint(8)).get(HintStore(tmp_path / "b" / "hints"))
    made = [path for top in ("a", "b") for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
    assert len(made) > 6
    for path in made:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


MOUNTS = """/dev/a / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/b /tmp/disk\\040one ext4 rw 0 0
none /ram ramfs rw 0 0
udev /dev devtmpfs rw 0 0
/dev/c /twice ext4 rw 0 0
tmpfs /twice tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/home/cache", False), ("/tmp/cache", True), ("/tmp", True), ("/tmp/disk one/cache", False),
        ("/tmpx/cache", False), ("/ram/x", True), ("/dev/x", True), ("/twice/x", True),
    ],
)  # fmt: skip
def test_a_file_system_in_memory_is_recognised(folder: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(MOUNTS))
    monkeypatch.setattr(Path, "resolve", lambda self: self)
    assert is_in_memory(Path(folder)) is expected


def test_a_system_that_does_not_tell_has_no_file_system_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", refuse)
    assert not is_in_memory(Path("/dev/shm"))
