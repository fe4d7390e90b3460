"""Tests the hint store: the hints that it returns, the files that it refuses, and what remains after an
interruption."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from noise.disk import private_files
from noise.hints.file import HEADER_BYTES, Hint
from noise.hints.store import HintKey, HintStore
from noise.params import choose
from noise.polynomial.negacyclic import product, secret_transform
from tests.support.exact_hints import KEY, ROWS, Provider, Reply, exact_hint
from tests.support.files import flip
from tests.support.reachable import reachable
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, InvalidTensor, MaskError, Unavailable, VerificationFailed
from wire.frame import Direction


def accept(first_row: int, rows: torch.Tensor) -> None:
    """Accepts all rows, and so stands for a check of replies that passes."""


def nothing(first_row: int, num_rows: int) -> Reply:
    raise AssertionError("nothing was to be fetched")


def rounded(hint: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """Rounds by the slow and obvious definition 2^t · ⌊H/2^t + 1/2⌋ mod 2^32, as int32."""
    step = 1 << dropped_bits
    wide = (hint.to(torch.int64) + step // 2).div(step, rounding_mode="floor") * step
    return ((wide + 2**31) % 2**32 - 2**31).to(torch.int32)


def small_ranges(folder: Path, features: int, rows_per_range: int = 10, **options: int) -> HintStore:
    return HintStore(folder, range_bytes=rows_per_range * features * 4, **options)


def the_file(folder: Path) -> Path:
    (file,) = folder.glob("*/*.safetensors")
    return file


@pytest.mark.parametrize("features", [1, 63, 64, 65, 131, 200])
@pytest.mark.parametrize("dropped_bits", [0, 8, 10, 12])
def test_roundtrip(tmp_path: Path, features: int, dropped_bits: int) -> None:
    exact = exact_hint(features)
    store = small_ranges(tmp_path / "hints", features, dropped_bits=dropped_bits)
    hint = Provider(exact).get(store)
    stored = hint.load(0, features)
    assert stored.dtype == torch.int32
    assert stored.shape == (ROWS, features)
    assert torch.equal(stored, rounded(exact, dropped_bits))
    distance = (stored.to(torch.int64) - exact.to(torch.int64) + 2**31) % 2**32 - 2**31
    assert int(distance.abs().max()) <= store.rounding_bound()
    assert store.rounding_bound() == (2 ** (dropped_bits - 1) if dropped_bits else 0)
    assert not bool((stored & ((1 << dropped_bits) - 1)).any())
    reopened = HintStore(tmp_path / "hints", dropped_bits=dropped_bits).get(KEY, (ROWS, features), nothing)
    assert torch.equal(reopened.load(0, features), stored)


def test_bits_on_disk(tmp_path: Path) -> None:
    for dropped_bits, bits in ((0, 32), (8, 24), (10, 22), (12, 20)):
        folder = tmp_path / str(bits)
        store = HintStore(folder, dropped_bits=dropped_bits)
        Provider(exact_hint(128)).get(store)
        assert the_file(folder).stat().st_size == HEADER_BYTES + 2 * 4 + ROWS * 128 * bits // 8
        assert store.total_bytes([(ROWS, 128)]) == store.stored_bytes() == the_file(folder).stat().st_size
    with pytest.raises(ConfigurationError, match="24"):
        HintStore(tmp_path, dropped_bits=9)


def test_any_columns(tmp_path: Path) -> None:
    exact = exact_hint(200)
    hint = Provider(exact).get(HintStore(tmp_path, dropped_bits=12))
    whole = rounded(exact, 12)
    for start, stop in [(0, 1), (0, 64), (64, 128), (63, 65), (1, 199), (192, 200), (199, 200), (100, 192)]:
        assert torch.equal(hint.load(start, stop), whole[:, start:stop])
    for start, stop in [(-1, 3), (3, 3), (5, 3), (190, 201)]:
        with pytest.raises(InvalidTensor):
            hint.load(start, stop)
    hint.load(0, 64).fill_(7)
    assert torch.equal(hint.load(0, 64), whole[:, :64])


def test_a_hint_goes_into_the_polynomial_product(tmp_path: Path) -> None:
    parameters = choose("default")
    exact = exact_hint(70, rows=parameters.dimension)
    hint = Provider(exact).get(HintStore(tmp_path))
    secrets = torch.arange(parameters.dimension).remainder(3).sub(1).to(torch.int8)
    secrets_hat = secret_transform(secrets.view(1, parameters.rank, parameters.ring_degree))
    (made,), (expected,) = (product(each, secrets_hat, parameters) for each in (hint, rounded(exact, 8)))
    assert torch.equal(made, expected)


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    Provider(exact_hint(100)).get(HintStore(tmp_path), verify=accept)
    with safe_open(the_file(tmp_path), "numpy") as file:
        assert sorted(file.keys()) == ["crc32", "tiles"]
        assert file.get_tensor("tiles").shape == (ROWS * 100 * 3,)
        stated = file.metadata()
    assert stated["weights"] == KEY.weights
    assert (stated["group"], stated["direction"], stated["dropped_bits"]) == ("3", "forward", "8")
    assert stated["verified"] == "true"


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    Provider(exact_hint(70)).get(HintStore(tmp_path / "hints"))
    for path in [tmp_path / "hints", *(tmp_path / "hints").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stop_at", range(5))
def test_an_interrupted_fetch_goes_on(tmp_path: Path, stop_at: int) -> None:
    exact = exact_hint(70)
    received: list[int] = []

    def note(first_row: int, rows: torch.Tensor) -> None:
        received.extend(range(first_row, first_row + rows.shape[0]))

    with pytest.raises(Unavailable):
        Provider(exact, fail_at=stop_at).get(small_ranges(tmp_path, 70), verify=note)
    assert received == list(range(stop_at * 10))
    assert not list(tmp_path.glob("*/*.safetensors"))
    second = Provider(exact)
    hint = second.get(small_ranges(tmp_path, 70, rows_per_range=7), verify=accept)
    assert [row for rows in second.asked for row in rows] == list(range(stop_at * 10, ROWS))
    assert torch.equal(hint.load(0, 70), rounded(exact, 8))
    assert not list(tmp_path.glob("*/*.part"))
    assert not list(tmp_path.glob("*/*.journal"))


def interrupted(folder: Path, stop_at: int, verify: Callable[[int, torch.Tensor], None] | None = accept) -> Provider:
    """Fetches a hint from a provider that fails after `stop_at` requests of ten rows each. Returns a provider that does
    not fail."""
    with pytest.raises(Unavailable):
        Provider(exact_hint(70), fail_at=stop_at).get(small_ranges(folder, 70), verify=verify)
    return Provider(exact_hint(70))


def test_a_range_that_decayed_meanwhile_is_fetched_again(tmp_path: Path) -> None:
    provider = interrupted(tmp_path, 3)
    (part,) = tmp_path.glob("*/*.part")
    flip(part, HEADER_BYTES + 2 * 4 + 15 * 64 * 3)  # row 15 of the first tile
    hint = provider.get(small_ranges(tmp_path, 70), verify=accept)
    assert [row for rows in provider.asked for row in rows] == [*range(10, 20), *range(30, ROWS)]
    assert torch.equal(hint.load(0, 70), rounded(provider.hint, 8))


def test_a_torn_journal_costs_its_torn_line_only(tmp_path: Path) -> None:
    provider = interrupted(tmp_path, 3)
    (journal,) = tmp_path.glob("*/*.journal")
    journal.write_text(journal.read_text().rstrip("\n")[:-4] + "\n[1]\nnull\n[0, 99, 5, true]\n\xff[")
    provider.fail_at = 1
    with pytest.raises(Unavailable):
        provider.get(small_ranges(tmp_path, 70), verify=accept)
    third = Provider(provider.hint)
    hint = third.get(small_ranges(tmp_path, 70), verify=accept)
    assert [row for rows in third.asked for row in rows] == list(range(30, ROWS))
    assert torch.equal(hint.load(0, 70), rounded(provider.hint, 8))


def test_a_checking_session_does_not_go_on_from_unchecked_ranges(tmp_path: Path) -> None:
    provider = interrupted(tmp_path, 3, verify=None)
    hint = provider.get(small_ranges(tmp_path, 70), verify=accept)
    assert sum(map(len, provider.asked)) == ROWS
    assert hint.verified


def test_checked_and_unchecked_ranges_make_an_unchecked_hint(tmp_path: Path) -> None:
    provider = interrupted(tmp_path, 3)
    hint = provider.get(small_ranges(tmp_path, 70))
    assert sum(map(len, provider.asked)) == ROWS - 30
    assert not hint.verified


def test_ranges_overlap_up_to_the_limit(tmp_path: Path) -> None:
    provider = Provider(exact_hint(70))
    provider.get(small_ranges(tmp_path, 70, rows_per_range=4, in_flight=3))
    assert provider.most_in_flight == 3
    narrow = Provider(exact_hint(71))
    narrow.get(small_ranges(tmp_path, 71, rows_per_range=20), rows_per_fetch=6)
    assert {len(rows) for rows in narrow.asked} == {6}


def test_a_reply_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    provider = Provider(exact_hint(70))
    with pytest.raises(InvalidTensor):
        HintStore(tmp_path).get(KEY, (ROWS, 71), provider.fetch)
    provider.hint = provider.hint.to(torch.float32)
    with pytest.raises(InvalidTensor):
        provider.get(HintStore(tmp_path))
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_a_failed_check_leaves_nothing(tmp_path: Path) -> None:
    exact = exact_hint(70)
    Provider(exact).get(HintStore(tmp_path))  # this hint is unchecked, and its provider is about to be caught lying

    def catch(first_row: int, rows: torch.Tensor) -> None:
        assert torch.equal(rows, exact[first_row : first_row + rows.shape[0]])  # the rows have 32 bits, before rounding
        if first_row >= 20:
            raise VerificationFailed("the provider's hint is wrong")

    with pytest.raises(VerificationFailed):
        Provider(exact).get(small_ranges(tmp_path, 70), verify=catch)
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]


def test_an_unchecked_hint_is_not_trusted_by_a_checking_session(tmp_path: Path) -> None:
    provider = Provider(exact_hint(70))
    store = HintStore(tmp_path)
    assert not provider.get(store).verified
    assert provider.get(store, verify=accept).verified
    assert len(provider.asked) == 2
    assert provider.get(store).verified
    assert HintStore(tmp_path).get(KEY, (ROWS, 70), nothing, verify=accept).verified


@pytest.mark.parametrize("offset", [3, 60, 500, HEADER_BYTES - 1])
def test_a_damaged_header_is_refused(tmp_path: Path, offset: int) -> None:
    Provider(exact_hint(70)).get(HintStore(tmp_path))
    flip(the_file(tmp_path), offset)
    with pytest.raises(MaskError, match="delete it"):
        HintStore(tmp_path).get(KEY, (ROWS, 70), nothing)


@pytest.mark.parametrize("offset", [HEADER_BYTES, HEADER_BYTES + 2 * 4, HEADER_BYTES + 5000])
def test_a_damaged_tile_is_refused_at_its_first_use(tmp_path: Path, offset: int) -> None:
    provider = Provider(exact_hint(70))
    provider.get(HintStore(tmp_path))
    flip(the_file(tmp_path), offset)
    hint = HintStore(tmp_path).get(KEY, (ROWS, 70), nothing)
    for _ in range(2):
        with pytest.raises(MaskError, match="tile 0"):
            hint.load(0, 64)
    assert torch.equal(hint.load(64, 70), rounded(provider.hint, 8)[:, 64:])


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, -1, +1])
def test_a_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    Provider(exact_hint(70)).get(HintStore(tmp_path))
    file = the_file(tmp_path)
    whole = file.stat().st_size
    os.truncate(file, whole + size if abs(size) == 1 else size)
    with pytest.raises(MaskError, match=str(whole)):
        HintStore(tmp_path).get(KEY, (ROWS, 70), nothing)


OTHERS = [
    HintKey("b" * 64, KEY.seed, 3, Direction.FORWARD),
    HintKey(KEY.weights, bytes(32), 3, Direction.FORWARD),
    HintKey(KEY.weights, KEY.seed, 4, Direction.FORWARD),
    HintKey(KEY.weights, KEY.seed, 3, Direction.BACKWARD),
]


@pytest.mark.parametrize("other", OTHERS, ids=["weights", "seed", "group", "direction"])
def test_another_key_is_another_hint_and_its_file_is_refused(tmp_path: Path, other: HintKey) -> None:
    store = HintStore(tmp_path)
    mine, theirs = Provider(exact_hint(70)), Provider(exact_hint(70).flip(0))
    mine.get(store)
    ours = the_file(tmp_path)
    before = set(tmp_path.glob("*/*.safetensors"))
    assert torch.equal(theirs.get(store, other).load(0, 70), rounded(theirs.hint, 8))
    (foreign,) = set(tmp_path.glob("*/*.safetensors")) - before
    foreign.replace(ours)
    with pytest.raises(MaskError, match="another model, seed"):
        HintStore(tmp_path).get(KEY, (ROWS, 70), nothing)


def test_a_key_must_be_a_digest_and_a_seed() -> None:
    with pytest.raises(ConfigurationError):
        HintKey("../" * 10, bytes(32), 0, Direction.FORWARD)
    with pytest.raises(ConfigurationError):
        HintKey("a" * 64, b"short", 0, Direction.FORWARD)


def test_a_full_disk_before_the_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        HintStore(tmp_path).get(KEY, (ROWS, 70), nothing)
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".lock"]


def test_a_disk_without_room_for_all_hints_is_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=40_000_000))
    HintStore(tmp_path / "hints").check_room(40_000_000)
    HintStore(None).check_room(50_000_000)
    with pytest.raises(
        ConfigurationError, match=r"hints take 50 MB in .*hints, where 40 MB are free; free some space, "
    ):
        HintStore(tmp_path / "hints").check_room(50_000_000)


@pytest.mark.parametrize("writes", range(12))
def test_a_disk_that_fills_up_leaves_no_file_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The disk is full after `writes` writes. A hint of 70 features takes ten writes of rows, and then two: the
    checksums and the header."""
    real, count = os.pwrite, 0

    def fill_up(handle: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count > writes:
            real(handle, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, offset)

    provider = Provider(exact_hint(70))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fill_up)
        with pytest.raises(ConfigurationError, match="No space left"):
            provider.get(small_ranges(tmp_path, 70))
    assert not list(tmp_path.glob("*/*.safetensors"))
    second = Provider(provider.hint)
    hint = second.get(small_ranges(tmp_path, 70))
    assert torch.equal(hint.load(0, 70), rounded(provider.hint, 8))
    assert sum(map(len, second.asked)) == ROWS - min(writes // 2, 4) * 10 if writes < 10 else len(second.asked) <= 1


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: real(handle, data[:100], offset))
    provider = Provider(exact_hint(70))
    assert torch.equal(provider.get(HintStore(tmp_path)).load(0, 70), rounded(provider.hint, 8))


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="stream"):
        Provider(exact_hint(70)).get(HintStore(tmp_path / "file" / "hints"))


def test_threads_fetch_one_hint_once(tmp_path: Path) -> None:
    for store in (HintStore(tmp_path), HintStore(None)):
        provider, gate = Provider(exact_hint(70)), threading.Barrier(4, timeout=WAIT_S)

        def ask(store: HintStore = store, provider: Provider = provider, gate: threading.Barrier = gate) -> Hint:
            gate.wait()
            return provider.get(store)

        with ThreadPoolExecutor(4) as pool:
            hints = [future.result(WAIT_S) for future in [pool.submit(ask) for _ in range(4)]]
        assert len(provider.asked) == 1
        assert all(hint is hints[0] for hint in hints)


@pytest.mark.slow
def test_a_second_process_waits_and_then_maps(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import fcntl, sys
        from pathlib import Path
        from noise.hints.store import HintKey, HintStore
        from wire.frame import Direction
        lock = fcntl.flock
        def tell(fd, operation):
            if operation == fcntl.LOCK_EX:
                print("waiting", flush=True)
            lock(fd, operation)
        fcntl.flock = tell
        def nothing(first_row, num_rows):
            raise AssertionError("fetched again")
        key = HintKey("a" * 64, bytes(range(32)), 3, Direction.FORWARD)
        hint = HintStore(Path(sys.argv[1])).get(key, (48, 70), nothing)
        print(hint.load(0, 70).sum().item(), flush=True)
    """)
    provider = Provider(exact_hint(70))
    others: list[subprocess.Popen[str]] = []

    def start_the_other(first_row: int, rows: torch.Tensor) -> None:
        if not others:  # at this point this process holds the lock
            command = [sys.executable, "-c", script, str(tmp_path)]
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert line_of(others[0]) == "waiting"

    hint = provider.get(small_ranges(tmp_path, 70), verify=start_the_other)
    assert int(line_of(others[0])) == int(hint.load(0, 70).sum())
    others[0].communicate()
    assert others[0].returncode == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["disk", "stream"])
def test_a_child_forked_in_the_middle_of_a_fetch_is_not_stuck(tmp_path: Path, where: str) -> None:
    """A child is forked while the parent holds the hint's own lock, the store's lock and, on disk, the lock between
    processes. The child can still use the store and close it."""
    store = HintStore(tmp_path if where == "disk" else None)
    parent, childs, answers = Provider(exact_hint(70)), Provider(exact_hint(70)), []

    def child() -> str:
        if where == "stream":  # on disk the child waits for its parent, as any other process does
            childs.get(store)
        store.forget(bytes(32))
        store.close()
        return f"{len(childs.asked)} fetches"

    def fork(first_row: int, rows: torch.Tensor) -> None:
        with store._lock:
            answers.append(in_child(child))

    hint = parent.get(store, verify=fork)
    assert answers == ["0 fetches" if where == "disk" else "1 fetches"]
    assert parent.get(store) is hint


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_does_not_keep_the_lock_between_processes(tmp_path: Path) -> None:
    """A forked child has a copy of the open lock file. Nevertheless, the lock must be free once the parent ends its
    fetch."""
    done, told = os.pipe()

    def live() -> None:
        os.close(told)
        os.read(done, 1)  # waits until the parent closes its end

    child = multiprocessing.get_context("fork").Process(target=live)

    def fork(first_row: int, rows: torch.Tensor) -> None:
        child.start()

    try:
        Provider(exact_hint(70)).get(HintStore(tmp_path), verify=fork)
        with next(tmp_path.glob("*/*.lock")).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # locks the file as another process would
    finally:
        os.close(told)
        child.join(WAIT_S)
        os.close(done)
    assert child.exitcode == 0


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def mapped_files(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line for line in lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_ram_budget_bounds_what_is_mapped(tmp_path: Path) -> None:
    provider = Provider(exact_hint(70))
    file_bytes = HintStore(tmp_path).total_bytes([(ROWS, 70)])
    store = HintStore(tmp_path, ram_budget_bytes=3 * file_bytes)
    keys = [HintKey(KEY.weights, KEY.seed, group, Direction.FORWARD) for group in range(5)]
    for key in keys:
        provider.get(store, key).load(0, 70)
    assert mapped_files(tmp_path) == 3
    first = store.get(keys[2], (ROWS, 70), nothing)  # this hint is kept, and is now the most recently used
    store.get(keys[0], (ROWS, 70), nothing)
    assert store.get(keys[2], (ROWS, 70), nothing) is first
    assert mapped_files(tmp_path) == 3
    tight = HintStore(tmp_path, ram_budget_bytes=file_bytes - 1)
    tight.get(keys[0], (ROWS, 70), nothing).load(0, 70)
    assert mapped_files(tmp_path) == 3
    Provider(exact_hint(640)).get(store)  # larger than the budget, so no hint is dropped for it
    assert mapped_files(tmp_path) == 3
    assert store.get(keys[2], (ROWS, 70), nothing) is first
    del first
    store.close()
    assert mapped_files(tmp_path) == 0


def test_stream_is_exact_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError("stream mode wrote to disk")

    for call in ("open", "pwrite", "mkdir", "posix_fallocate"):
        monkeypatch.setattr(os, call, refuse)
    provider = Provider(exact_hint(70))
    hint_bytes = ROWS * 70 * 4
    store = HintStore(None, ram_budget_bytes=hint_bytes - 1, range_bytes=2000)
    for use in (1, 2):
        hint = provider.get(store, verify=accept)
        assert torch.equal(hint.load(3, 69), provider.hint[:, 3:69])
        assert sum(map(len, provider.asked)) == use * ROWS
    assert hint.verified
    assert (store.dropped_bits, store.rounding_bound(), store.stored_bytes()) == (0, 0, 0)
    assert store.total_bytes([(ROWS, 70)]) == hint_bytes
    roomy = HintStore(None, ram_budget_bytes=hint_bytes)
    assert provider.get(roomy) is roomy.get(KEY, (ROWS, 70), nothing)
    hint.load(0, 70).fill_(7)
    assert torch.equal(hint.load(0, 70), provider.hint)


def test_forgetting_a_seed_deletes_its_hints_only(tmp_path: Path) -> None:
    store, other = HintStore(tmp_path), OTHERS[1]
    provider = Provider(exact_hint(70))
    kept = provider.get(store)
    provider.get(store, other)
    store.forget(KEY.seed)
    assert torch.equal(kept.load(0, 70), rounded(provider.hint, 8))
    store.get(other, (ROWS, 70), nothing)
    provider.get(store)
    assert len(provider.asked) == 3


def left_in(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*")]


@pytest.mark.parametrize("stop_at", [0, 2])
def test_a_seed_forgotten_during_a_fetch_does_not_disturb_it(tmp_path: Path, stop_at: int) -> None:
    """One thread fetches a hint while another renews the seed. The fetched hint is complete, and it is kept neither on
    disk nor in memory."""
    store, provider = small_ranges(tmp_path, 70), Provider(exact_hint(70))

    def forget(first_row: int, rows: torch.Tensor) -> None:
        if first_row == stop_at * 10:
            store.forget(KEY.seed)

    hint = provider.get(store, verify=forget)
    assert torch.equal(hint.load(0, 70), rounded(provider.hint, 8))
    assert left_in(tmp_path) == []
    assert reachable(store, Hint) == [], "a forgotten hint is not kept"


def test_a_forgotten_hint_that_is_asked_for_once_more_is_not_stored(tmp_path: Path) -> None:
    store, provider = HintStore(tmp_path), Provider(exact_hint(70))
    provider.get(store)
    assert len(reachable(store, Hint)) == 1
    store.forget(KEY.seed)
    for _ in range(2):
        hint = provider.get(store, verify=accept)
        assert torch.equal(hint.load(0, 70), provider.hint)
        assert hint.verified
    assert left_in(tmp_path) == []
    assert (reachable(store, Hint), store.stored_bytes()) == ([], 0)


@pytest.mark.parametrize("kind", [VerificationFailed, Unavailable])
def test_a_fetch_that_fails_after_forgetting_leaves_nothing(tmp_path: Path, kind: type[Exception]) -> None:
    store, provider = small_ranges(tmp_path, 70), Provider(exact_hint(70))

    def fail(first_row: int, rows: torch.Tensor) -> None:
        if first_row == 20:
            store.forget(KEY.seed)
            raise kind("at the third range")

    with pytest.raises(kind):
        provider.get(store, verify=fail)
    assert left_in(tmp_path) == []


def test_another_process_that_still_fetches_is_left_alone(tmp_path: Path) -> None:
    """If one process renews the seed, it does not delete the hint that another is fetching. The other process has
    reserved blocks of the old seed, and deletes this hint when it renews the seed itself."""
    ours, theirs = HintStore(tmp_path), small_ranges(tmp_path, 70)
    provider = Provider(exact_hint(70))
    provider.get(ours, replace(KEY, group=9))

    def forget(first_row: int, rows: torch.Tensor) -> None:
        ours.forget(KEY.seed)

    hint = provider.get(theirs, verify=forget)
    assert torch.equal(hint.load(0, 70), rounded(provider.hint, 8))
    assert the_file(tmp_path).name.startswith("3-"), "the other one is gone"
    theirs.get(KEY, (ROWS, 70), nothing)
    theirs.forget(KEY.seed)
    assert left_in(tmp_path) == []


def test_forgetting_while_others_fetch_never_breaks_a_fetch(tmp_path: Path) -> None:
    """Several stores share a folder, as several processes do. They fetch and forget hints as fast as they can, and
    every fetch succeeds."""
    exact = exact_hint(70)

    def work(number: int) -> None:
        for _ in range(40):
            store, provider = small_ranges(tmp_path, 70, 24), Provider(exact)
            assert torch.equal(provider.get(store).load(0, 70), rounded(exact, 8))
            store.forget(KEY.seed)
            store.stored_bytes()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    HintStore(tmp_path).forget(KEY.seed)
    assert left_in(tmp_path) == []
