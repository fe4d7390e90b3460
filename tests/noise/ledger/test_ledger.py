"""Tests that no slot is used twice and that counts are never too low: with threads, processes, forks, kills, full disks
and damaged files."""

from __future__ import annotations

import copy
import errno
import fcntl
import inspect
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noise.blocks.slots import SlotsExhausted
from noise.ledger import ledger as module
from noise.ledger.ledger import Ledger, SeedExhausted
from tests.support.repository import ROOT
from tests.support.threads import together
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, MaskError

BUDGET = 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identity" / "acme.ledger"


def opened(path: Path, **options: Any) -> Ledger:
    return Ledger.open(path, "acme", **options)


def used(path: Path) -> dict[str, int]:
    """Returns the counts that a newly started process would read."""
    fresh = opened(path)
    totals = {seed.seed_id: seed.used for seed in fresh.audit()}
    fresh.close()
    return totals


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_can_be_copied_or_pickled(path: Path, duplicate: Callable[[Any], Any]) -> None:
    ledger = opened(path)
    reservation = ledger.reserve(ledger.current_seed("toy", BUDGET).seed_id, 1, "x")
    for thing in (ledger, reservation.open_block(4)):
        with pytest.raises(TypeError, match="copied nor pickled"):
            duplicate(thing)
    if duplicate is copy.copy:
        shallow = copy.copy(reservation)  # the copy shares the state, so no block comes twice
        with pytest.raises(SlotsExhausted):
            shallow.open_block(4)
    else:
        with pytest.raises(TypeError, match="copied nor pickled"):
            duplicate(reservation)


# seeds and reservations


def test_a_seed_is_drawn_once_and_found_again_after_a_restart(path: Path) -> None:
    first = opened(path).current_seed("default", BUDGET)
    again = opened(path).current_seed("default", BUDGET)
    assert (again.seed, again.seed_id, again.used) == (first.seed, first.seed_id, 0)
    assert len(first.seed) == 32
    assert first.seed.hex() not in repr(first)
    other_set = opened(path).current_seed("lean", BUDGET)
    other_table = opened(path).current_seed("default", BUDGET // 2)  # another release's budget gets its own seed
    assert len({first.seed, other_set.seed, other_table.seed}) == 3


def test_two_ledgers_draw_different_seeds(tmp_path: Path) -> None:
    seeds = {opened(tmp_path / str(n)).current_seed("default", BUDGET).seed for n in range(2)}
    assert len(seeds) == 2


def test_blocks_are_counted_and_opened_once(path: Path) -> None:
    ledger = opened(path)
    seed_id = ledger.current_seed("default", BUDGET).seed_id
    one, two = ledger.reserve(seed_id, 2, "forward"), ledger.reserve(seed_id, 3, "backward")
    assert [(r.first_block, r.num_blocks) for r in (one, two)] == [(0, 2), (2, 3)]
    assert used(path) == {seed_id: 5}
    assert [one.open_block(4).remaining, one.open_block(4).remaining] == [4, 4]
    with pytest.raises(SlotsExhausted):
        one.open_block(4)


def test_a_restart_abandons_what_was_reserved(path: Path) -> None:
    ledger = opened(path)
    seed_id = ledger.current_seed("default", BUDGET).seed_id
    ledger.reserve(seed_id, 7, "never used")
    ledger.close()
    assert opened(path).reserve(seed_id, 1, "after").first_block == 7


def test_the_record_is_written_and_synced_before_reserve_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path)
    seed_id = ledger.current_seed("default", BUDGET).seed_id
    synced: list[bytes] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    ledger.reserve(seed_id, 3, "forward")
    assert synced
    assert synced[-1] == path.read_bytes()
    assert json.loads(synced[-1].splitlines()[-1][17:])["blocks"] == 3


def test_budget_exhaustion_and_renewal(path: Path) -> None:
    ledger = opened(path)
    first = ledger.current_seed("toy", 10)
    ledger.reserve(first.seed_id, 8, "x")
    with pytest.raises(SeedExhausted, match="8 of 10"):
        ledger.reserve(first.seed_id, 3, "x")
    ledger.reserve(first.seed_id, 2, "x")  # the refused reservation was not counted
    second = ledger.renew(first.seed_id)
    assert second.seed != first.seed
    assert ledger.renew(first.seed_id).seed_id == second.seed_id  # a later caller gets the same seed
    assert ledger.current_seed("toy", 10).seed_id == second.seed_id
    with pytest.raises(SeedExhausted):
        ledger.reserve(first.seed_id, 1, "x")
    assert [(seed.used, seed.budget) for seed in ledger.audit()] == [(10, 10), (0, 10)]


def test_current_seed_does_not_return_an_exhausted_one(path: Path) -> None:
    ledger = opened(path)
    first = ledger.current_seed("toy", 1)
    ledger.reserve(first.seed_id, 1, "x")
    assert ledger.current_seed("toy", 1).seed_id != first.seed_id


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_reservation_cannot_give_budget_back(path: Path, num_blocks: int) -> None:
    ledger = opened(path)
    seed_id = ledger.current_seed("toy", 10).seed_id
    with pytest.raises(MaskError, match="at least 1"):
        ledger.reserve(seed_id, num_blocks, "x")
    assert used(path) == {seed_id: 0}


def test_more_than_any_seed_can_serve_is_not_a_reason_to_renew(path: Path) -> None:
    ledger = opened(path)
    with pytest.raises(MaskError, match="more than a seed") as caught:
        ledger.reserve(ledger.current_seed("toy", 10).seed_id, 11, "x")
    assert not isinstance(caught.value, SeedExhausted)


def test_an_unknown_seed_and_a_closed_ledger_are_refused(path: Path) -> None:
    ledger = opened(path)
    with pytest.raises(MaskError, match="no seed"):
        ledger.reserve("0123456789abcdef", 1, "x")
    ledger.close()
    ledger.close()
    with pytest.raises(MaskError, match="closed"):
        ledger.audit()


def test_one_time_seeds_are_counted_before_they_are_given(path: Path) -> None:
    ledger = opened(path)
    seeds = {ledger.fresh_seed("shares") for _ in range(module.ONE_TIME_BATCH)}
    assert used(path) == {"shares": module.ONE_TIME_BATCH}
    seeds.add(ledger.fresh_seed("shares"))
    assert len(seeds) == module.ONE_TIME_BATCH + 1
    assert {len(seed) for seed in seeds} == {32}
    ledger.fresh_seed("pad")
    opened(path).fresh_seed("pad")
    assert used(path) == {"shares": 2 * module.ONE_TIME_BATCH, "pad": 2 * module.ONE_TIME_BATCH}


def test_a_closed_ledger_gives_no_seed_that_it_has_counted_already(path: Path) -> None:
    ledger = opened(path)
    ledger.fresh_seed("shares")
    ledger.close()
    for kind in ("shares", "pad"):
        with pytest.raises(MaskError, match="closed"):
            ledger.fresh_seed(kind)  # type: ignore[arg-type]
    assert used(path) == {"shares": module.ONE_TIME_BATCH}


def test_threads_share_one_time_batches(path: Path) -> None:
    ledger = opened(path)
    per_thread = module.ONE_TIME_BATCH // 2
    parts = together(4, lambda: [ledger.fresh_seed("shares") for _ in range(per_thread)])
    assert len({seed for part in parts for seed in part}) == 4 * per_thread
    assert used(path) == {"shares": 4 * per_thread}


# threads and processes


def reserve_through_renewals(ledger: Ledger, num_calls: int, budget: int) -> list[tuple[str, int]]:
    """Reserves blocks, and renews the seed whenever its budget is used up. Returns (seed, block number) of every
    block."""
    seed, blocks = ledger.current_seed("toy", budget), []
    while len(blocks) < num_calls:
        try:
            blocks.append((seed.seed_id, ledger.reserve(seed.seed_id, 1, "worker").first_block))
        except SeedExhausted:
            seed = ledger.renew(seed.seed_id)
    return blocks


@pytest.mark.parametrize("one_ledger_each", [False, True])
@pytest.mark.parametrize("compact_bytes", [module.COMPACT_BYTES, 500])
def test_threads_never_share_a_block(path: Path, one_ledger_each: bool, compact_bytes: int) -> None:
    shared = opened(path, compact_bytes=compact_bytes)

    def work() -> list[tuple[str, int]]:
        ledger = opened(path, compact_bytes=compact_bytes) if one_ledger_each else shared
        return reserve_through_renewals(ledger, 25, budget=30)

    check_blocks([block for part in together(6, work) for block in part], path, budget=30)


def check_blocks(blocks: list[tuple[str, int]], path: Path, budget: int) -> None:
    """Checks that every block is there once, that every seed was used up before the next was drawn, and that the file
    agrees."""
    assert len(set(blocks)) == len(blocks)
    counts: dict[str, int] = {}
    for seed_id, _ in blocks:
        counts[seed_id] = counts.get(seed_id, 0) + 1
    totals = used(path)
    assert {seed_id: count for seed_id, count in totals.items() if count} == counts
    assert sorted(totals.values())[1:] == [budget] * (len(totals) - 1)
    assert len(totals) == -(-len(blocks) // budget)


WORKER = f"""
import json, sys
from pathlib import Path
from noise.ledger.ledger import Ledger, SeedExhausted

{inspect.getsource(reserve_through_renewals)}
path, num_calls, budget, compact_bytes = Path(sys.argv[1]), *map(int, sys.argv[2:])
print("ready", flush=True)
sys.stdin.readline()
ledger = Ledger.open(path, "acme", compact_bytes=compact_bytes)
print(json.dumps(reserve_through_renewals(ledger, num_calls, budget)), flush=True)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, text=True, **pipes)


def test_a_ledger_is_opened_without_torch() -> None:
    """To load torch takes seconds, and the command that shows a ledger computes nothing."""
    process = start("import sys, noise.ledger.ledger; print(sys.modules.keys() & {'torch', 'numpy'})")
    assert process.communicate(timeout=WAIT_S)[0] == "set()\n"


@pytest.mark.parametrize("compact_bytes", [module.COMPACT_BYTES, 500])
def test_processes_share_one_count_and_renew_once(path: Path, compact_bytes: int) -> None:
    """The file does not exist when the processes start. With a limit of 500 bytes it is compacted every few records."""
    workers = [start(WORKER, path, 60, 50, compact_bytes) for _ in range(4)]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        outputs = []
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            out, err = worker.communicate(timeout=WAIT_S)
            assert worker.returncode == 0, err
            outputs += [(seed_id, block) for seed_id, block in json.loads(out)]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(WAIT_S)
    check_blocks(outputs, path, budget=50)


def test_compaction_keeps_the_totals_and_bounds_the_file(path: Path) -> None:
    ledger, watcher = opened(path, compact_bytes=1000), opened(path)
    first = ledger.current_seed("toy", 100)
    for _ in range(60):
        ledger.reserve(first.seed_id, 1, "w" * 10_000)  # a long note is cut
        assert path.stat().st_size < 3000
    second = ledger.renew(first.seed_id)
    for _ in range(20):
        ledger.reserve(second.seed_id, 2, "x")
        watcher.reserve(first.seed_id, 1, "old seed with room left")
    for view in (ledger, watcher, opened(path)):
        assert [(seed.seed_id, seed.used, seed.num_reservations) for seed in view.audit()] == [
            (first.seed_id, 80, 80),
            (second.seed_id, 40, 20),
        ]
        assert view.current_seed("toy", 100).seed == second.seed
    assert {entry.name for entry in path.parent.iterdir()} == {"acme.ledger", "acme.ledger.lock"}


def test_records_after_a_compaction_go_to_the_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path, compact_bytes=1)
    seed_id = ledger.current_seed("toy", BUDGET).seed_id
    before = path.stat().st_ino
    ledger.reserve(seed_id, 2, "compacts")
    compacted = path.stat().st_ino
    monkeypatch.setattr(os, "replace", disk_full)
    ledger.reserve(seed_id, 4, "does not")
    assert path.stat().st_ino == compacted != before
    assert used(path) == {seed_id: 6}


CRASH = """
import sys
from pathlib import Path
from noise.ledger.ledger import Ledger

ledger = Ledger.open(Path(sys.argv[1]), "acme", compact_bytes=700)
seed_id = ledger.current_seed("toy", 1 << 40).seed_id
while True:
    reservation = ledger.reserve(seed_id, 3, "loop")
    print(reservation.first_block + 3, flush=True)
"""


@pytest.mark.parametrize("num_reports", [1, 17, 60])
def test_a_killed_process_used_no_more_than_is_counted(path: Path, num_reports: int) -> None:
    worker = start(CRASH, path)
    assert worker.stdout is not None
    try:
        for _ in range(num_reports):
            assert worker.stdout.readline()
    finally:
        worker.kill()
    reports = [int(line) for line in worker.communicate(timeout=WAIT_S)[0].splitlines() if line]
    (count,) = used(path).values()
    assert count >= max(reports, default=3 * num_reports) >= 3 * num_reports
    ledger = opened(path)  # the lock of the dead process does not block anyone
    assert ledger.reserve(ledger.audit()[0].seed_id, 1, "after").first_block == count


# forks

FORK = """
import ctypes, os, sys, threading
from pathlib import Path
from noise.ledger.ledger import Ledger
from wire.errors import MaskReused

libc = ctypes.CDLL(None)

def same_pid():  # as in a new pid namespace: the child cannot tell by its pid
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.getpid = lambda: parent
    return child

ledger = Ledger.open(Path(sys.argv[1]), "acme")
seed_id = ledger.current_seed("toy", 1000).seed_id
reservation = ledger.reserve(seed_id, 8, "x")
slots = reservation.open_block(8)
ledger.fresh_seed("shares")
fork = {"python": os.fork, "libc": libc.fork, "same-pid": same_pid}[sys.argv[2]]
held = sys.argv[3] == "held"
if held:  # as if another thread were inside at that moment: the child must not wait for it
    locks = (ledger._lock, ledger._batch_lock, slots._lock)
    for lock in locks:
        lock.acquire()
child = fork()
if child == 0:
    asks = [lambda: slots.take(1), lambda: slots.take_up_to(1), lambda: reservation.open_block(8),
            lambda: ledger.reserve(seed_id, 1, "x"), lambda: ledger.current_seed("toy", 1000),
            lambda: ledger.renew(seed_id), lambda: ledger.fresh_seed("shares"), lambda: ledger.audit()]
    refused = 0
    for ask in asks:
        try:
            ask()
        except MaskReused as exc:
            refused += "fork" in str(exc)
    ledger.close()
    anew = Ledger.open(Path(sys.argv[1]), "acme")
    refused += anew.reserve(seed_id, 1, "child").first_block == 8
    os._exit(0 if refused == len(asks) + 1 else 1)
_, status = os.waitpid(child, 0)
if held:
    for lock in locks:
        lock.release()
assert list(slots.take(2)) == [0, 1]
assert ledger.reserve(seed_id, 1, "x").first_block == 9
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("kind", ["python", "libc", "same-pid"])
@pytest.mark.parametrize("locks", ["free", "held"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(path: Path, kind: str, locks: str) -> None:
    command = [sys.executable, "-c", FORK, str(path), kind, locks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "0\n", done.stderr


# files that are not as they should be


def filled(path: Path) -> str:
    """Makes a ledger at `path` with 10 blocks in two records, and returns the id of its seed."""
    ledger = opened(path)
    seed_id = ledger.current_seed("toy", BUDGET).seed_id
    ledger.reserve(seed_id, 4, "first")
    ledger.reserve(seed_id, 6, "second")
    ledger.close()
    return seed_id


def test_a_record_torn_anywhere_is_cut_off_and_said(path: Path) -> None:
    seed_id = filled(path)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last + 1, len(whole)):
        path.write_bytes(whole[:length])
        ledger = opened(path)
        assert ledger.reserve(seed_id, 1, "after").first_block == 4
        ledger.close()
        assert used(path) == {seed_id: 5}
        torn = json.loads(path.read_bytes().splitlines()[-2][17:])
        assert (torn["op"], torn["bytes"]) == ("torn", length - last)


def test_zeros_after_the_end_are_a_torn_record_too(path: Path) -> None:
    """Zeros after the last record are ignored. A file system may leave them after a crash, if a file's new size reached
    the disk before its data."""
    seed_id = filled(path)
    with path.open("ab") as file:
        file.write(bytes(512))
    assert opened(path).reserve(seed_id, 1, "after").first_block == 10
    assert used(path) == {seed_id: 11}


def test_any_changed_byte_is_noticed(path: Path) -> None:
    filled(path)
    whole = path.read_bytes()
    for position in range(len(whole) - 1):  # without only its last newline, the record is torn, which is another case
        for change in (0x01, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= change
            path.write_bytes(damaged)
            with pytest.raises(ConfigurationError, match="damaged at record"):
                opened(path)


def test_a_lost_doubled_or_moved_record_is_noticed(path: Path) -> None:
    filled(path)
    header, seed, first, second = path.read_bytes().splitlines(keepends=True)
    for lines in ([header, seed, second], [header, seed, second, first], [header, seed, first, first], [seed], [b""]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(ConfigurationError, match="damaged at record"):
            opened(path)


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Writes a ledger's records again, changed by `change`, and with correct checksums."""
    records = [json.loads(line[17:]) for line in path.read_bytes().splitlines()]
    change(records)
    path.write_bytes(module.encode(records, module.MAGIC))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda records: records[0].update(version=2), "version 2 and this release reads 1"),
        (lambda records: records[-1].update(op="borrow"), "damaged at record 4"),
        (lambda records: records[-1].update(seed="another"), "damaged at record 4"),
        (lambda records: records[-1].pop("blocks"), "damaged at record 4"),
        (lambda records: records.insert(2, records[0]), "damaged at record 3"),
        (lambda records: records[1]["seed"].update(colour="red"), "damaged at record 2"),
    ],
)
def test_what_this_release_cannot_read_is_refused(path: Path, change: Any, sentence: str) -> None:
    filled(path)
    rewritten(path, change)
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_another_identity_is_refused_and_not_named(path: Path) -> None:
    filled(path)
    with pytest.raises(ConfigurationError, match="another identity") as caught:
        Ledger.open(path, "globex")
    assert "'acme'" not in str(caught.value)
    assert used(path)  # the owner can still read it


def test_the_file_is_private_and_must_stay_so(path: Path) -> None:
    old = os.umask(0)
    try:
        filled(path)
        opened(path, compact_bytes=1).reserve(next(iter(used(path))), 1, "compacts")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_name("acme.ledger.lock").stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        opened(path)


def test_a_link_in_place_of_the_file_is_not_followed(path: Path) -> None:
    """Compaction would replace the link, and leave a file of the same seeds and lower counts behind it."""
    filled(path)
    elsewhere = path.rename(path.with_name("elsewhere"))
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        opened(path)
    path.unlink()
    elsewhere.rename(path)
    assert used(path)


def test_damage_under_an_open_ledger_stops_it(path: Path) -> None:
    seed_id = filled(path)
    ledger = opened(path)
    with path.open("ab") as file:
        file.write(b"garbage\n")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="damaged at record 5"):
            ledger.reserve(seed_id, 1, "x")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_went_back_in_time_is_noticed_by_who_remembers(path: Path, in_place: bool) -> None:
    seed_id = filled(path)
    backup = path.read_bytes()
    ledger = opened(path)
    ledger.reserve(seed_id, 5, "later")
    if in_place:
        path.write_bytes(backup)
    else:
        older = path.with_name("older")
        older.write_bytes(backup)
        older.chmod(0o600)
        older.replace(path)
    for _ in range(2):
        with pytest.raises(MaskError, match="older or another"):
            ledger.reserve(seed_id, 1, "x")


def test_a_file_taken_away_stops_its_users_and_a_new_one_has_new_seeds(path: Path) -> None:
    seed_id = filled(path)
    ledger = opened(path)
    path.rename(path.with_name("away"))
    with pytest.raises(MaskError, match="cannot be kept"):
        ledger.reserve(seed_id, 1, "x")
    assert opened(path).current_seed("toy", BUDGET).seed_id != seed_id
    with pytest.raises(MaskError, match="older or another"):
        ledger.reserve(seed_id, 1, "x")


# disks that fail


def disk_full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    return lambda fd, data: real(fd, data[: len(data) // 2])


@pytest.mark.parametrize("fault", ["write", "short write", "fsync", "short write, no truncate", "fsync, no truncate"])
def test_a_full_disk_hands_out_nothing_and_recovers(path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    seed_id = filled(path)
    ledger, other = opened(path), opened(path)
    with monkeypatch.context() as patch:
        call = "fsync" if fault.startswith("fsync") else "write"
        patch.setattr(os, call, half_written(os.write) if fault.startswith("short") else disk_full)
        if fault.endswith("no truncate"):
            patch.setattr(os, "ftruncate", disk_full)
        with pytest.raises(MaskError, match="No space left on device") as caught:
            ledger.reserve(seed_id, 100, "x")
        with pytest.raises(MaskError, match="No space left on device"):
            ledger.renew(seed_id)
        with pytest.raises(MaskError, match="No space left on device"):
            ledger.fresh_seed("shares")
    assert str(caught.value).endswith("no mask was handed out")
    blocks = [other.reserve(seed_id, 1, "x").first_block, ledger.reserve(seed_id, 1, "x").first_block]
    # A record that could be neither synced nor removed is counted, so that the count is too high and never too low.
    counted = 110 if fault == "fsync, no truncate" else 10
    assert blocks == [counted, counted + 1]
    assert used(path)[seed_id] == counted + 2


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_ledger_that_cannot_be_made_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, disk_full)
        with pytest.raises(ConfigurationError, match="cannot be opened for writing: No space left") as caught:
            opened(path)
        assert "\n" not in str(caught.value)
    assert opened(path).audit() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_read_only_folder_is_one_sentence(path: Path) -> None:
    path.parent.mkdir(mode=0o500)
    with pytest.raises(ConfigurationError, match="cannot be opened for writing: Permission denied"):
        opened(path)


def test_a_compaction_that_fails_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path, compact_bytes=300)
    seed_id = ledger.current_seed("toy", BUDGET).seed_id
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", disk_full)
        for block in range(20):
            assert ledger.reserve(seed_id, 1, "x").first_block == block
    long = path.stat().st_size
    assert ledger.reserve(seed_id, 1, "x").first_block == 20
    assert path.stat().st_size < long / 2
    assert used(path) == {seed_id: 21}


def test_nothing_is_handed_out_while_a_compacted_file_may_vanish(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compacted file was renamed, but the folder was not synced, so the old file could be back after a power cut.
    Reserving blocks fails until the folder is synced."""
    ledger, other = opened(path, compact_bytes=1), opened(path)
    seed_id = ledger.current_seed("toy", BUDGET).seed_id
    real = os.fsync

    def folder_fails(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            disk_full()
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", folder_fails)
        assert ledger.reserve(seed_id, 1, "in the old file too").first_block == 0
        for user in (ledger, other):
            with pytest.raises(MaskError, match="No space left"):
                user.reserve(seed_id, 1, "in the new file only")
    assert [user.reserve(seed_id, 1, "x").first_block for user in (ledger, other)] == [1, 2]


def test_a_lock_file_replaced_meanwhile_is_locked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waited for the old lock file must not write at the same time as processes that lock the new
    one."""
    seed_id = filled(path)
    ledger, lock = opened(path), path.with_name("acme.ledger.lock")
    flock, fsync, locked = fcntl.flock, os.fsync, []

    def replaced_once(fd: int, operation: int) -> None:
        flock(fd, operation)
        if operation == fcntl.LOCK_EX and not locked:
            locked.append(False)
            lock.unlink()
            lock.touch(0o600)

    def look(fd: int) -> None:
        fsync(fd)
        with lock.open() as file:
            try:
                flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)

    monkeypatch.setattr(fcntl, "flock", replaced_once)
    monkeypatch.setattr(os, "fsync", look)
    assert ledger.reserve(seed_id, 1, "x").first_block == 10
    assert locked == [False, True]
