"""Tests the store of replies: they are returned unchanged, the disk holds only encrypted data, and a disk that is full
or damaged gives an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk.training.activation_checkpointing import ReplyStore
from tests.support.threads import in_child
from wire.errors import StorageError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def file_of(folder: Path) -> Path:
    """Returns the path of this process's open descriptor of the store's file, since the file itself has no name."""
    handles = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    (found,) = [each for each in handles if os.path.lexists(each) and str(folder) in os.readlink(each)]
    return found


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30, 50_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replies_come_back_bit_for_bit(tmp_path: Path, memory_bytes: int, dtype: torch.dtype) -> None:
    store = ReplyStore(memory_bytes, tmp_path)
    shapes = [(0, 7), (1, 1), (3, 5), (100, 33), (600, 1000)]
    replies = [torch.randn(shape).to(dtype) for shape in shapes] + [torch.randn(40, 60).T.to(dtype)]
    kept = [store.keep(reply) for reply in replies]
    for reply, one in reversed(list(zip(replies, kept, strict=True))):
        assert torch.equal(one.take(), reply)
        assert one.take().dtype is dtype
    assert (store.bytes_on_disk > 0) is (memory_bytes < 1 << 30)
    store.close()


def test_a_kept_reply_is_a_copy(tmp_path: Path) -> None:
    for memory_bytes in (0, 1 << 20):
        store, reply = ReplyStore(memory_bytes, tmp_path), torch.ones(4, 4)
        kept = store.keep(reply)
        reply.zero_()
        assert torch.equal(kept.take(), torch.ones(4, 4))
        store.close()


def test_memory_and_file_are_used_again(tmp_path: Path) -> None:
    store = ReplyStore(4 * 1000, tmp_path)
    for _ in range(3):
        kept = [store.keep(torch.randn(500)) for _ in range(4)]
        assert store.bytes_on_disk == 2 * 2000
        assert len(kept) == 4
        del kept
    store.close()


def test_the_disk_sees_nothing_that_was_kept_and_no_record_twice(tmp_path: Path) -> None:
    store, reply = ReplyStore(0, tmp_path), torch.arange(50_000, dtype=torch.float32)
    seen = []
    for _ in range(3):
        kept = store.keep(reply)
        seen.append(file_of(tmp_path).read_bytes())
        assert torch.equal(kept.take(), reply)
        del kept
    other = ReplyStore(0, tmp_path / "other")
    other.keep(reply)
    seen.append(file_of(tmp_path / "other").read_bytes())
    plain = bytes(reply.numpy())
    assert list(tmp_path.iterdir()) == [tmp_path / "other"], "the file has no name"
    for number, one in enumerate(seen):
        assert len(one) == len(plain)
        for another in (plain, *seen[:number]):
            same = sum(a == b for a, b in zip(one, another, strict=True))
            assert same / len(plain) < 0.006, "more than 1 of 256 bytes agree: a nonce or a key was used twice"
    store.close()
    other.close()


def test_the_file_is_its_owners_and_ends_with_the_store(tmp_path: Path) -> None:
    store = ReplyStore(0, tmp_path / "new")
    kept = store.keep(torch.ones(10))
    assert file_of(tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert file_of(tmp_path / "new").stat().st_nlink == 0, "a process that is killed leaves nothing"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    store.close()
    with pytest.raises(ValueError, match="not enough values"):
        file_of(tmp_path / "new")
    with pytest.raises(StorageError) as failure:
        kept.take()
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_a_damaged_file_is_an_error(tmp_path: Path, damage: str) -> None:
    store = ReplyStore(0, tmp_path)
    kept = store.keep(torch.randn(1000, 700))
    with file_of(tmp_path).open("r+b") as file:
        if damage == "cut":
            file.truncate(1_500_000)
        else:
            file.seek(1_234_567)
            byte = file.read(1)
            file.seek(1_234_567)
            file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match="is damaged") as failure:
        kept.take()
    assert "\n" not in str(failure.value)
    store.close()


def test_records_cannot_be_exchanged(tmp_path: Path) -> None:
    store = ReplyStore(0, tmp_path)
    kept = [store.keep(torch.randn(100)) for _ in range(2)]
    with file_of(tmp_path).open("r+b") as file:
        first, second = file.read(400), file.read(400)
        file.seek(0)
        file.write(second + first)
    for one in kept:
        with pytest.raises(StorageError, match="other bytes than were written"):
            one.take()
    store.close()


def test_a_forked_child_can_neither_read_nor_write(tmp_path: Path) -> None:
    store, reply = ReplyStore(0, tmp_path), torch.randn(100)
    kept = store.keep(reply)

    def child() -> str:
        for act in (kept.take, lambda: store.keep(torch.ones(3))):
            with pytest.raises(StorageError):
                act()
        return "refused"

    assert in_child(child) == "refused"
    assert torch.equal(kept.take(), reply)
    store.close()


def test_errors_call_the_store_by_its_name(tmp_path: Path) -> None:
    store = ReplyStore(0, tmp_path, "the file of a test", "leave it out")
    kept = store.keep(torch.randn(100))
    store.close()
    with pytest.raises(StorageError, match=r"^the file of a test in .*make room there, or leave it out$"):
        kept.take()


def test_reserving_takes_the_space(tmp_path: Path) -> None:
    store = ReplyStore(1000, tmp_path)
    store.reserve(800)
    assert store.bytes_on_disk == 0
    store.reserve(5000)
    assert store.bytes_on_disk == file_of(tmp_path).stat().st_size == 4000
    assert file_of(tmp_path).stat().st_blocks * 512 >= 4000
    store.close()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = ReplyStore(100, tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for act in (lambda: store.reserve(500), lambda: store.keep(torch.ones(100))):
        with pytest.raises(StorageError, match=r"No space left on device.*memory_budget_mb") as failure:
            act()
        assert "\n" not in str(failure.value)
    kept = store.keep(torch.ones(25))
    assert torch.equal(kept.take(), torch.ones(25)), "memory is still there"
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        ReplyStore(0, tmp_path / "file" / "inner").reserve(1)
    store.close()
