"""Tests the encrypted file of ready mask rows: each record is read once, changed bytes are an error, and nobody else
can read it."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.blocks.pool import Block, MaskPool, RowCounts, default_disk_bytes
from noise.blocks.row_file import HELD_BYTES, MOST_RECORD_ROWS, Record, RowFile
from noise.blocks.slots import Slots
from noise.scheme import GroupSpec
from tests.support.files import mode, umask_of
from tests.support.threads import at_once, in_child
from tests.support.waiting import WAIT_S, until
from wire.errors import ConfigurationError, MaskError, MaskReused, StorageError, VeilbaseError
from wire.frame import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SIZE = 1 << 16
SPEC = GroupSpec(0, 3, 5, 1.0, 1.0, torch.ones(5))
ROW_BYTES = 4 * (3 + 5)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RowFile]:
    made = RowFile(tmp_path / "masks", SIZE)
    yield made
    made.close()


def rows(first: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(first, first + count, dtype=torch.int32)[:, None]
    return numbers.repeat(1, 3), -numbers.repeat(1, 5)


def put(file: RowFile, first: int, group: int = 0, direction: Direction = FORWARD, count: int = 4) -> Record:
    record = file.put(group, direction, *rows(first, count))
    assert record is not None
    return record


def handle_of(file: RowFile) -> Any:
    return file._file


def key_of(file: RowFile) -> bytearray:
    return file._key


def is_rows(taken: tuple[torch.Tensor, torch.Tensor], first: int, count: int = 4) -> bool:
    return all(torch.equal(*pair) for pair in zip(taken, rows(first, count), strict=True))


def content(file: RowFile) -> bytes:
    return os.pread(handle_of(file).fileno(), SIZE, 0)


def flip(file: RowFile, place: int) -> None:
    (byte,) = os.pread(handle_of(file).fileno(), 1, place)
    os.pwrite(handle_of(file).fileno(), bytes([byte ^ 1]), place)


# ---- each record once -----------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were_in_any_order(file: RowFile) -> None:
    records = [put(file, 10 * number, number % 3, Direction(number % 2)) for number in range(20)]
    order = list(range(20))
    random.Random(1).shuffle(order)
    assert all(is_rows(file.take(records[number]), 10 * number) for number in order)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_a_record_is_bytes_of_any_type(file: RowFile, dtype: torch.dtype) -> None:
    mask, effect = (torch.randint(0, 100, (3, columns), dtype=dtype) for columns in (7, 2001))
    record = file.put(0, FORWARD, mask, effect)
    assert record is not None
    assert record.num_bytes == 3 * 2008 * dtype.itemsize
    taken = file.take(record)
    assert torch.equal(taken[0], mask)
    assert torch.equal(taken[1], effect)
    taken[0].add_(1)  # as `mask` does


def test_a_record_is_read_once(file: RowFile) -> None:
    record = put(file, 1)
    file.take(record)
    with pytest.raises(MaskReused, match="read twice"):
        file.take(record)
    dropped = put(file, 2)
    file.drop(dropped)
    with pytest.raises(MaskReused, match="read twice"):
        file.take(dropped)


def test_of_many_threads_one_gets_a_record(file: RowFile) -> None:
    for number in range(20):
        record = put(file, number)

        def take(record: Record = record, number: int = number) -> int:
            try:
                return int(is_rows(file.take(record), number))
            except MaskReused:
                return 0

        assert sum(at_once([take] * 8)) == 1


def test_places_are_used_again_and_nonces_are_not(file: RowFile) -> None:
    seen: set[int] = set()
    places: set[int] = set()
    for number in range(3 * SIZE // (4 * ROW_BYTES)):
        record = put(file, number)
        seen.add(record.number)
        places.add(record.place)
        assert is_rows(file.take(record), number)
    assert len(seen) == 3 * SIZE // (4 * ROW_BYTES)
    assert places == {0}


def test_a_number_is_not_used_again_after_a_failed_write(file: RowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError, match="cannot be written"):
            put(file, 1)
    record = put(file, 2)
    assert record.number == 1
    assert record.place == 0  # the place of the failed one is free
    assert is_rows(file.take(record), 2)


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    file = RowFile(tmp_path, 10 * ROW_BYTES)
    records = [put(file, 0), put(file, 4)]
    assert file.put(0, FORWARD, *rows(8)) is None
    file.take(records[0])
    assert is_rows(file.take(put(file, 8)), 8)
    file.close()
    empty = RowFile(tmp_path, 0)
    assert empty.put(0, FORWARD, *rows(8)) is None
    empty.close()


# ---- changed bytes --------------------------------------------------------------------------------------------------


def swap(file: RowFile, one: Record, other: Record) -> None:
    fd = handle_of(file).fileno()
    first, second = (os.pread(fd, each.num_bytes, each.place) for each in (one, other))
    os.pwrite(fd, second, one.place)
    os.pwrite(fd, first, other.place)


BROKEN: dict[str, Callable[[RowFile, Record, Record], Record]] = {
    "first byte": lambda file, record, other: (flip(file, record.place), record)[1],
    "last byte": lambda file, record, other: (flip(file, record.place + record.num_bytes - 1), record)[1],
    "swapped": lambda file, record, other: (swap(file, record, other), record)[1],
    "another place": lambda file, record, other: replace(record, place=other.place),
    "another tag": lambda file, record, other: replace(record, tag=other.tag),
    "another group": lambda file, record, other: replace(record, group=1),
    "another direction": lambda file, record, other: replace(record, direction=BACKWARD),
    "other widths": lambda file, record, other: replace(
        record, mask_form=record.effect_form, effect_form=record.mask_form
    ),
    "another number": lambda file, record, other: replace(record, number=other.number),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_not_the_record_is_an_error_and_burns_it(file: RowFile, broken: str) -> None:
    record, other, whole = put(file, 1), put(file, 11), put(file, 21)
    given = BROKEN[broken](file, record, other)
    with pytest.raises(StorageError, match="other bytes than were written") as failure:
        file.take(given)
    assert "\n" not in str(failure.value)
    with pytest.raises(MaskReused):
        file.take(given)
    assert is_rows(file.take(whole), 21)


def test_nothing_of_a_damaged_record_stays_in_memory(file: RowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    from noise.blocks import row_file

    empty = row_file.empty_rows
    monkeypatch.setattr(row_file, "empty_rows", lambda *form: made.append(empty(*form)) or made[-1])
    record = put(file, 1)
    flip(file, record.place)
    with pytest.raises(StorageError):
        file.take(record)
    assert len(made) == 2
    assert not any(bool(each.any()) for each in made)


def test_a_file_that_was_cut_off_is_an_error(file: RowFile) -> None:
    records = [put(file, 1), put(file, 11)]
    os.ftruncate(handle_of(file).fileno(), records[1].place + 5)
    assert is_rows(file.take(records[0]), 1)
    with pytest.raises(StorageError, match="too short"):
        file.take(records[1])
    with pytest.raises(MaskReused):
        file.take(records[1])


def test_a_disk_that_cannot_be_read_is_one_line(file: RowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    record = put(file, 1)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=r"cannot be read \(Input/output error\)"):
        file.take(record)
    with pytest.raises(MaskReused):
        file.take(record)


# ---- what others can see --------------------------------------------------------------------------------------------


def test_nothing_in_the_file_is_plain(file: RowFile) -> None:
    """The file holds no eight bytes in succession of any mask or effect, before and after it was read."""
    mask, effect = (torch.randint(-(2**31), 2**31, (8, columns)).to(torch.int32) for columns in (40, 24))
    record = file.put(0, FORWARD, mask, effect)
    assert record is not None
    plain = mask.numpy().tobytes() + effect.numpy().tobytes()
    pieces = {plain[at : at + 8] for at in range(0, len(plain), 8)}
    held = content(file)
    assert held[: len(plain)].count(0) < len(plain) // 16  # something was written
    assert not any(piece in held for piece in pieces)
    file.take(record)
    assert not any(piece in content(file) for piece in pieces)
    zeros = file.put(0, FORWARD, torch.zeros(8, 40, dtype=torch.int32), torch.zeros(8, 24, dtype=torch.int32))
    again = file.put(0, FORWARD, torch.zeros(8, 40, dtype=torch.int32), torch.zeros(8, 24, dtype=torch.int32))
    assert zeros is not None and again is not None  # noqa: PT018
    first, second = (content(file)[each.place : each.place + each.num_bytes] for each in (zeros, again))
    assert first != second, "equal rows look alike"
    assert bytes(64) not in first


def test_two_files_have_two_keys(tmp_path: Path) -> None:
    one, other = RowFile(tmp_path, SIZE), RowFile(tmp_path, SIZE)
    record = put(one, 1)
    assert put(other, 1).number == record.number
    assert content(one)[: record.num_bytes] != content(other)[: record.num_bytes]
    one.close()
    other.close()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_the_file_has_no_name_and_is_its_owners(tmp_path: Path, umask: int) -> None:
    with umask_of(umask):
        file = RowFile(tmp_path / "outer" / "masks", SIZE)
    assert mode(file.folder) == 0o700
    assert list(file.folder.iterdir()) == []
    found = os.fstat(handle_of(file).fileno())
    assert (found.st_mode & 0o777, found.st_nlink, found.st_size) == (0o600, 0, SIZE)
    assert not os.get_inheritable(handle_of(file).fileno())
    file.close()


def test_its_space_is_reserved(file: RowFile) -> None:
    assert os.fstat(handle_of(file).fileno()).st_blocks * 512 >= SIZE


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        RowFile(tmp_path, SIZE)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_a_folder_in_memory_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "cache"
    link.symlink_to("/dev/shm/veilbase-test")
    for folder in (Path("/dev/shm/veilbase-test/masks"), link / "masks"):
        with pytest.raises(ConfigurationError, match=r"is memory \(tmpfs\): name a cache on a disk") as failure:
            RowFile(folder, SIZE)
        assert "\n" not in str(failure.value)
    assert not Path("/dev/shm/veilbase-test").exists()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match=r"expected 5000 MB of free disk .*No space left.*smaller pool_bytes"):
        RowFile(tmp_path, 5_000_000_000)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="cannot make its file"):
        RowFile(tmp_path / "taken" / "masks", SIZE)


# ---- the end --------------------------------------------------------------------------------------------------------


def test_closing_ends_the_file_and_overwrites_the_key(file: RowFile) -> None:
    record, key, handle = put(file, 1), key_of(file), handle_of(file)
    assert any(key)
    file.close()
    assert (file.is_closed, handle.closed, any(key)) == (True, True, False)
    for use in (lambda: file.take(record), lambda: file.drop(record), lambda: file.put(0, FORWARD, *rows(1))):
        with pytest.raises(MaskError, match="closed"):
            use()
    file.close()


def test_a_forgotten_file_is_closed(tmp_path: Path) -> None:
    file = RowFile(tmp_path, SIZE)
    key, handle = key_of(file), handle_of(file)
    del file
    assert (handle.closed, any(key)) == (True, False)


def test_closing_while_others_read_and_write(tmp_path: Path) -> None:
    for _ in range(5):
        file = RowFile(tmp_path, SIZE)
        started = threading.Barrier(5)

        def work(file: RowFile = file, started: threading.Barrier = started) -> str:
            started.wait(WAIT_S)
            try:
                while True:
                    assert is_rows(file.take(put(file, 7)), 7)
            except MaskError as exc:
                return str(exc)

        with ThreadPoolExecutor(4) as threads:
            working = [threads.submit(work) for _ in range(4)]
            started.wait(WAIT_S)
            file.close()
            assert {each.result(WAIT_S) for each in working} == {"this mask was closed"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_held", [False, True])
def test_a_forked_child_can_neither_read_nor_write(file: RowFile, is_held: bool) -> None:
    record = put(file, 1)

    def child() -> str:
        said = []
        for use in (lambda: file.take(record), lambda: file.drop(record), lambda: file.put(0, FORWARD, *rows(1))):
            with pytest.raises(MaskReused) as failure:
                use()
            said.append(str(failure.value))
        assert len(set(said)) == 1
        assert "\n" not in said[0]
        return f"closed {handle_of(file).closed}, key {any(key_of(file))}"

    if is_held:
        with file.reading, file.writing, file.places:
            assert in_child(child) == "closed True, key False"
    else:
        assert in_child(child) == "closed True, key False"
    assert any(key_of(file))
    assert is_rows(file.take(record), 1)  # the parent goes on


def test_a_file_can_be_neither_copied_nor_pickled(file: RowFile) -> None:
    for use in (lambda: pickle.dumps(file), lambda: copy.copy(file), lambda: copy.deepcopy(file)):
        with pytest.raises(TypeError, match="copied"):
            use()


# ---- a pool with a file ---------------------------------------------------------------------------------------------


class Making:
    """Makes blocks of 64 rows, each with a number of its own."""

    def __init__(self) -> None:
        self.next = 1
        self.lock = threading.Lock()

    def __call__(self, spec: GroupSpec, direction: Direction, num_rows: int) -> list[Block]:
        with self.lock:
            begin, self.next = self.next, self.next + 64 * -(-num_rows // 64)
        return [Block(*rows(first, 64), Slots(64)) for first in range(begin, self.next, 64)]


def pool_on(file: RowFile, background: bool = False) -> MaskPool:
    return MaskPool(Making(), 64, file.num_bytes, background, features=8, file=file)


def taken(pool: MaskPool, count: int, spec: GroupSpec = SPEC) -> list[int]:
    mask, effect = pool.take(spec, FORWARD, count)
    assert torch.equal(effect[:, :3], -mask)
    return mask[:, 0].tolist()


def test_one_token_reads_one_record(file: RowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has 64 rows. The 16 that the first call begins stay in memory, and each later record is read alone."""
    reads: list[int] = []
    read = RowFile.take
    monkeypatch.setattr(RowFile, "take", lambda self, record: (reads.append(record.num_rows), read(self, record))[1])
    pool = pool_on(file)
    got = [taken(pool, 1)[0] for _ in range(48)]
    assert got == list(range(1, 49))
    assert reads == [MOST_RECORD_ROWS] * 2
    assert pool.held_bytes == 0  # 16 rows are left, in the file
    assert pool.ready_bytes == 16 * ROW_BYTES
    pool.close()


def test_the_reader_has_the_next_record_ready(file: RowFile) -> None:
    pool = pool_on(file, background=True)
    for _ in range(3 * MOST_RECORD_ROWS):
        taken(pool, 1)
        until(lambda: pool.held_bytes > 0, "the reader")
    assert pool.held_bytes <= MOST_RECORD_ROWS * ROW_BYTES
    pool.close()


def test_what_waits_in_memory_is_bounded(tmp_path: Path) -> None:
    """Records are so small that one of every group fits into the bound."""
    specs = [GroupSpec(number, 3, 5, 1.0, 1.0, torch.ones(5)) for number in range(8)]
    file = RowFile(tmp_path, 8 * 4 * 64 * ROW_BYTES, held_bytes=8 * 4 * ROW_BYTES + 5)
    pool = MaskPool(Making(), 64, file.num_bytes, True, features=64, file=file)
    for spec in specs:
        pool.prepare(spec, FORWARD, 64)
    assert (pool.held_bytes, pool.ready_bytes) == (0, 8 * 64 * ROW_BYTES)
    for _ in range(20):
        for spec in specs:
            taken(pool, 1, spec)
            assert pool.held_bytes <= file.held_bytes
    pool.close()


def test_rows_that_the_file_has_no_room_for_wait_in_memory(tmp_path: Path) -> None:
    file = RowFile(tmp_path, 20 * ROW_BYTES)
    pool = pool_on(file)
    got = [taken(pool, 1)[0] for _ in range(64)]  # 16 for the call, 16 in the file, and the others after them
    assert got == [*range(1, 17), *range(33, 65), *range(17, 33)]
    assert pool.ready_bytes == 0
    pool.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_record_fails_one_call_and_counts_as_used(file: RowFile, background: bool) -> None:
    pool = pool_on(file, background)
    assert taken(pool, 1) == [1]
    flip(file, 2)  # in rows 17 to 32
    assert [taken(pool, 1)[0] for _ in range(14)] == list(range(2, 16))
    said = []
    got: list[int] = []
    while len(got) < 17:
        try:
            got += taken(pool, 1)
        except VeilbaseError as exc:
            said.append(str(exc))
    assert got == [16, *range(33, 49)]
    assert [each.count("other bytes than were written") for each in said] == [1]
    assert pool.row_counts().burnt == 16
    pool.close()


def test_rows_are_counted_wherever_they_are(file: RowFile) -> None:
    pool = pool_on(file)
    taken(pool, 3)
    assert pool.row_counts() == RowCounts(made=64, ready=61, burnt=0)
    assert pool.ready_rows() == {(0, FORWARD): 61}
    taken(pool, 20)
    assert pool.row_counts() == RowCounts(made=64, ready=41, burnt=0)
    pool.close()


@pytest.mark.parametrize("background", [False, True])
def test_eight_threads_get_each_row_once(file: RowFile, background: bool) -> None:
    pool = pool_on(file, background)
    specs = [SPEC, replace_id(1), replace_id(2)]

    def work(seed: int) -> list[int]:
        draw = random.Random(seed)
        return [number for _ in range(60) for number in taken(pool, draw.choice([1, 1, 5, 17, 70]), draw.choice(specs))]

    with ThreadPoolExecutor(8) as threads:
        got = [number for mine in threads.map(work, range(8)) for number in mine]
    assert len(set(got)) == len(got)
    if not background:
        counts = pool.row_counts()
        assert counts.made - counts.ready == len(got)
    pool.close()


def replace_id(number: int) -> GroupSpec:
    return GroupSpec(number, 3, 5, 1.0, 1.0, torch.ones(5))


def test_a_disk_that_cannot_be_written_is_the_callers_error(file: RowFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_on(file)

    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(StorageError, match="No space left"):
            taken(pool, 1)
    assert taken(pool, 1) == [65]  # rows of a block that could not be kept are never used
    pool.close()


def test_closing_a_pool_closes_its_file(file: RowFile) -> None:
    pool = pool_on(file, background=True)
    taken(pool, 1)
    pool.close()
    assert file.is_closed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_no_rows_of_a_file(file: RowFile) -> None:
    pool = pool_on(file, background=True)
    taken(pool, 1)

    def child() -> str:
        for use in (lambda: pool.take(SPEC, FORWARD, 1), lambda: pool.prepare(SPEC, FORWARD, 64)):
            with pytest.raises(MaskReused):
                use()
        return f"{pool.ready_bytes} bytes, closed {file.is_closed}"

    assert in_child(child) == "0 bytes, closed True"
    assert taken(pool, 40) == list(range(2, 42))
    pool.close()


@pytest.mark.parametrize(
    ("features", "free_bytes", "expected"),
    [
        (65_792 * 32, 100 << 30, 1024 * 65_792 * 32 * 4),  # two blocks of every layer of a 7B model
        (65_792 * 32, 8 << 30, 2 << 30),  # a quarter of the free disk
        (10_000_000, None, 16 << 30),
        (65_792 * 32, None, 1024 * 65_792 * 32 * 4),
        (16, 100 << 30, 64 << 20),
    ],
)
def test_the_default_size_follows_model_and_disk(features: int, free_bytes: int | None, expected: int) -> None:
    assert default_disk_bytes(features, free_bytes) == expected


def test_the_rows_of_a_record_follow_the_model(file: RowFile) -> None:
    assert file.rows_of_records(0) == file.rows_of_records(4 * 270_000 // 2) == MOST_RECORD_ROWS
    assert file.rows_of_records(65_792 * 32 * 4) == HELD_BYTES // (65_792 * 32 * 4) == 15
    assert file.rows_of_records(1 << 40) == 1
