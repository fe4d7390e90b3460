"""Tests the tiers, budgets and waiting of the adapter store: which request gets a place when, and which errors it
gets."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters import device as device_module
from tenant_sdk.serving.adapters import host as host_module
from tenant_sdk.serving.adapters.device import DeviceTier
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS, OpenAdapter
from tenant_sdk.serving.adapters.store import MOST_OPEN, MOST_PASSED, RANKS, Placement
from tests.support.saved_adapters import (
    Bell,
    Openings,
    answers,
    base_model,
    code_of,
    coded_model,
    held,
    open_files,
    save_adapter,
    save_coded,
)
from wire.errors import ConfigurationError

NUM_ADAPTERS, RANK = 8, 8
PACKED_BYTES = 2 * RANK * 4 * 32
"""The bytes of an adapter of q and v in bfloat16. A and B have 32 × 8 numbers each."""


@pytest.fixture(scope="module")
def model() -> Any:
    return coded_model()


@pytest.fixture
def root(model: Any, tmp_path: Path) -> Path:
    for number in range(NUM_ADAPTERS):
        save_coded(model, tmp_path / f"a{number}", code_of(number), RANK, seed=number)
    for name in ("wide", "wider"):
        save_coded(model, tmp_path / name, code_of(77), 30, seed=len(name))
    return tmp_path


def loaded_so_far(store: AdapterStore, bell: Bell) -> None:
    """Waits until all reserved adapters are loaded, in a store with one place of each rank.

    To know this, the function reserves two adapters of another rank. One of them has to be loaded, and that comes after
    all earlier ones.
    """
    for name in ("wide", "wider"):
        for loan in held(store, bell, name):
            loan.release()


@contextlib.contextmanager
def held_up(where: Any, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stops all callers of a function until the second event is set. The first event is set when a caller has
    arrived."""
    there, go_on, real = threading.Event(), threading.Event(), getattr(where, name)

    def slow(*args: Any, **options: Any) -> Any:
        there.set()
        go_on.wait()
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, slow)
        try:
            yield there, go_on
        finally:
            go_on.set()  # a test that fails must not leave a thread behind


class Reads:
    """Counts how often adapters are read from disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        tensors = OpenAdapter.tensors

        def counted(opened: OpenAdapter) -> Any:
            self.names.append(opened.name)
            return tensors(opened)

        monkeypatch.setattr(OpenAdapter, "tensors", counted)


@pytest.fixture
def no_racy_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the store rely on the stamps of new files, since a test does not change its files within a tick of the
    clock."""
    monkeypatch.setattr("tenant_sdk.serving.adapters.reader.RACY_NS", -1)


def test_what_has_a_place_is_ready_at_once(model: Any, root: Path, no_racy_files: None) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    (first,) = held(store, bell, "a1")
    second = store.reserve("a1")
    assert second.is_ready()
    assert (second.adapter_index, second.digest) == (first.adapter_index, first.digest)
    first.release()
    first.release()  # once more does nothing
    assert answers(store, model, [second.adapter_index]) == [code_of(1)]
    second.release()
    assert store.reserve("a1").is_ready()
    store.close()


def test_loans_say_nothing_before_they_are_ready_and_no_place_after(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    with held_up(host_module, "pack") as (_, go_on):
        loan = store.reserve("a1")
        assert not loan.is_ready()
        with pytest.raises(ConfigurationError, match="not in a place"):
            _ = loan.adapter_index
        with pytest.raises(ConfigurationError, match="not loaded yet"):
            _ = loan.digest
        go_on.set()
        bell.wait_for(loan)
    digest = loan.digest
    loan.release()
    assert not loan.is_ready()
    assert loan.digest == digest
    with pytest.raises(ConfigurationError, match="not in a place"):
        _ = loan.adapter_index
    store.close()


def test_the_place_used_longest_ago_goes_first(model: Any, root: Path, no_racy_files: None) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=2)
    one, two = held(store, bell, "a1", "a2")
    one.release()
    two.release()
    store.reserve("a1").release()  # now a2 was used longest ago
    (three,) = held(store, bell, "a3")
    assert store.reserve("a1").is_ready()
    assert not store.reserve("a2").is_ready()
    assert answers(store, model, [three.adapter_index]) == [code_of(3)]
    store.close()


def test_host_memory_keeps_to_its_budget_and_spares_the_disk(
    model: Any, root: Path, monkeypatch: pytest.MonkeyPatch, no_racy_files: None
) -> None:
    bell, reads = Bell(), Reads(monkeypatch)
    store = AdapterStore(model, root, on_ready=bell, device_slots=1, host_bytes=2 * PACKED_BYTES)

    def use(name: str) -> None:
        (loan,) = held(store, bell, name)
        assert answers(store, model, [loan.adapter_index]) == [code_of(int(name[1:]))]
        loan.release()

    for name in ("a1", "a2", "a1"):
        use(name)
    assert reads.names == ["a1", "a2"]
    use("a3")  # drops a2, which was used longest ago
    use("a1")
    assert reads.names == ["a1", "a2", "a3"]
    use("a2")
    assert reads.names == ["a1", "a2", "a3", "a2"]
    assert store.status().host_bytes == 2 * PACKED_BYTES
    assert (store.status().device_loads, store.status().disk_reads) == (6, 4)
    store.close()


def test_every_place_is_held_or_reusable(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=2)
    num_places = store.status().device_reusable
    assert num_places == 2 * (len(RANKS) + 1), "each rank has places, and so have the adapters of other kinds"
    loans = held(store, bell, "a1", "a1", "a2", "wide")
    assert (store.status().device_held, store.status().device_reusable) == (3, num_places - 3)
    for loan in loans:
        loan.release()
    assert (store.status().device_adapters, store.status().device_held) == (3, 0)
    assert store.status().device_reusable == num_places
    store.close()


def test_an_adapter_that_cannot_be_used_counts_as_no_load(model: Any, root: Path) -> None:
    weights = load_file(root / "a1" / WEIGHTS)
    first = next(iter(weights))
    save_file({**weights, first: torch.full_like(weights[first], torch.nan)}, root / "a1" / WEIGHTS)
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    loan = store.reserve("a1")
    bell.wait_for(loan)
    assert loan.failure is not None
    assert (store.status().device_loads, store.status().disk_reads) == (0, 0)
    store.close()


def test_more_adapters_than_places_wait_in_their_order(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    (first,) = held(store, bell, "a1")
    waiting = [store.reserve("a2"), store.reserve("a3"), store.reserve("a4")]
    loaded_so_far(store, bell)
    assert [loan.is_ready() for loan in waiting] == [False] * 3
    assert store.status().waiting == 3
    waiting[1].release()  # no longer wanted
    assert store.status().waiting == 2
    for number, (before, after) in zip((2, 4), ((first, waiting[0]), (waiting[0], waiting[2])), strict=True):
        before.release()
        bell.wait_for(after)
        assert answers(store, model, [after.adapter_index]) == [code_of(number)]
    assert not waiting[1].is_ready()
    store.close()


def test_an_adapter_that_is_dropped_stays_until_its_last_request_ends(
    model: Any, root: Path, no_racy_files: None
) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    first, second = held(store, bell, "a1", "a1")
    store.drop("a1")
    first.release()
    store.loader.submit(lambda: None).result()
    assert answers(store, model, [second.adapter_index]) == [code_of(1)]
    assert store.status().device_adapters == 1
    second.release()
    store.loader.submit(lambda: None).result()
    status = store.status()
    assert (status.device_adapters, status.host_adapters, status.host_bytes) == (0, 0, 0)
    assert status.device_reusable == 1 + len(RANKS)
    for name, code in (("a2", 2), ("a1", 1)):  # the place is as good as new
        (loan,) = held(store, bell, name)
        assert answers(store, model, [loan.adapter_index]) == [code_of(code)]
        loan.release()
    store.close()


def test_other_ranks_do_not_wait(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    held(store, bell, "a1")
    late = store.reserve("a2")
    (wide,) = held(store, bell, "wide")
    assert answers(store, model, [wide.adapter_index]) == [code_of(77)]
    assert not late.is_ready()
    store.close()


def test_who_waits_is_passed_a_bounded_number_of_times(model: Any, root: Path, no_racy_files: None) -> None:
    """Requests for a popular adapter would never leave its place free. After some time they queue behind the request
    that waits."""
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    (popular,) = held(store, bell, "a1")
    other = store.reserve("a2")
    loaded_so_far(store, bell)
    num_passed = 0
    while (following := store.reserve("a1")).is_ready():
        popular.release()
        popular = following
        num_passed += 1
    assert num_passed == MOST_PASSED
    popular.release()
    bell.wait_for(other)
    other.release()
    bell.wait_for(following)
    assert answers(store, model, [following.adapter_index]) == [code_of(1)]
    store.close()


def test_who_was_to_have_a_place_that_another_took_stays_the_first(model: Any, root: Path, no_racy_files: None) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    (holder,) = held(store, bell, "a1")
    waiting = [store.reserve("a2"), store.reserve("a3")]
    loaded_so_far(store, bell)
    with held_up(Placement, "place") as (begun, go_on):
        holder.release()
        begun.wait()  # a2 is about to have the place
        holder = store.reserve("a1")  # its adapter is still there
        assert holder.is_ready()
        go_on.set()
        loaded_so_far(store, bell)
    assert not waiting[0].is_ready()
    holder.release()
    bell.wait_for(waiting[0])
    assert not waiting[1].is_ready()
    assert answers(store, model, [waiting[0].adapter_index]) == [code_of(2)]
    store.close()


def test_who_comes_later_does_not_take_the_place_of_one_that_waits(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    (holder,) = held(store, bell, "a1")
    waiting = store.reserve("a2")
    loaded_so_far(store, bell)
    with held_up(Placement, "place") as (begun, go_on):
        later = store.reserve("a3")
        begun.wait()  # a3 is about to look for a place
        holder.release()
        go_on.set()
        bell.wait_for(waiting)
    assert not later.is_ready()
    waiting.release()
    bell.wait_for(later)
    assert answers(store, model, [later.adapter_index]) == [code_of(3)]
    store.close()


def test_a_loan_that_is_released_while_it_loads_gives_its_place_back(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    with held_up(DeviceTier, "fill") as (begun, go_on):
        loan = store.reserve("a1")
        begun.wait()
        waiting = store.reserve("a2")
        loan.release()
        go_on.set()
        bell.wait_for(waiting)
    assert not loan.is_ready()
    assert answers(store, model, [waiting.adapter_index]) == [code_of(2)]
    assert store.status().device_held == 1
    store.close()


def test_a_place_is_nobodys_until_it_is_filled(model: Any, root: Path, no_racy_files: None) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    for name in ("a1", "a2"):  # afterwards a1's digest is known, and it has no place
        for loan in held(store, bell, name):
            loan.release()
    with held_up(DeviceTier, "fill") as (begun, go_on):
        first = store.reserve("a1")
        begun.wait()
        second = store.reserve("a1")
        assert not first.is_ready()
        assert not second.is_ready()
        go_on.set()
        bell.wait_for(first, second)
    assert first.adapter_index == second.adapter_index
    assert answers(store, model, [second.adapter_index]) == [code_of(1)]
    store.close()


def test_close_fails_those_that_wait_and_refuses_others(model: Any, root: Path) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    (first,) = held(store, bell, "a1")
    waiting = store.reserve("a2")
    store.close()
    assert "was closed" in str(waiting.failure)
    first.release()
    waiting.release()
    with pytest.raises(ConfigurationError, match="is closed"):
        store.reserve("a3")


def test_an_adapter_with_nan_fails_its_own_loan_only(model: Any, root: Path, no_racy_files: None) -> None:
    path = root / "a2" / WEIGHTS
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, path)
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    loans = [store.reserve(name) for name in ("a1", "a2", "a3")]
    bell.wait_for(*loans)
    assert str(loans[1].failure) == "the adapter a2 holds NaN or infinite numbers, or such as torch.bfloat16 has not"
    assert answers(store, model, [loans[0].adapter_index, loans[2].adapter_index]) == [code_of(1), code_of(3)]
    with pytest.raises(ConfigurationError, match="holds NaN"):  # known by now, and not read again
        store.reserve("a2")
    save_coded(model, root / "a2", code_of(2), RANK, seed=2)
    os.utime(path, (1, 1))  # the file system's clock may not have ticked since
    (mended,) = held(store, bell, "a2")
    assert answers(store, model, [mended.adapter_index]) == [code_of(2)]
    store.close()


def test_an_adapter_too_large_for_its_tier(root: Path) -> None:
    model = base_model()
    save_adapter(model, root / "large", seed=1, r=64)
    save_adapter(model, root / "high", seed=1, r=300, target_modules=["q_proj"])
    store = AdapterStore(model, root, host_bytes=100_000)
    with pytest.raises(ConfigurationError, match=r"large takes 0\.\d MB: the host tier has 0\.1 MB"):
        store.reserve("large")
    with pytest.raises(ConfigurationError, match="high has the rank 300: the device tier takes up to 256"):
        store.reserve("high")
    store.close()


def test_an_adapter_of_another_base(root: Path) -> None:
    store = AdapterStore(base_model("gpt2"), root)
    with pytest.raises(ConfigurationError, match="for another base"):
        store.reserve("a1")
    store.close()


def test_a_base_by_another_name(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    model.name_or_path = "acme/own"
    save_adapter(base_model(), tmp_path / "one", seed=1)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    with pytest.raises(ConfigurationError, match="trained on 'tiny-llama', and this model is 'acme/own'"):
        store.reserve("one")
    store.close()
    store = AdapterStore(model, tmp_path, on_ready=bell, bases=["tiny-llama"])
    held(store, bell, "one")
    store.close()


def test_a_device_without_memory_fails_one_loan(
    model: Any, root: Path, monkeypatch: pytest.MonkeyPatch, no_racy_files: None
) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=1)
    with monkeypatch.context() as patch:
        patch.setattr(device_module, "Stack", lambda *_: torch.empty(1 << 60))
        loan = store.reserve("a1")
        bell.wait_for(loan)
        assert str(loan.failure) == "the adapter a1 cannot be loaded (RuntimeError)"
    (again,) = held(store, bell, "a1")
    assert answers(store, model, [again.adapter_index]) == [code_of(1)]
    store.close()


def test_preloading_fills_the_tiers_before_the_first_request(
    model: Any, root: Path, monkeypatch: pytest.MonkeyPatch, no_racy_files: None
) -> None:
    reads, bell = Reads(monkeypatch), Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=2, preload=["a1", "a2", "a3"])
    assert sorted(reads.names) == ["a1", "a2", "a3"]
    assert store.reserve("a1").is_ready()
    second = store.reserve("a2")
    assert second.is_ready()
    assert not store.reserve("a3").is_ready()
    second.release()
    assert len(reads.names) == 3
    store.close()


def test_preloading_what_is_not_there(model: Any, root: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no adapter 'nobody' in the folder"):
        AdapterStore(model, root, preload=["a1", "nobody"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device_slots": 0}, "device_slots was expected to be 1 to 64, got 0"),
        ({"device_slots": 65}, "device_slots"),
        ({"dtype": torch.float16}, "kept in torch.bfloat16 or torch.float32"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str, model: Any, root: Path) -> None:
    with pytest.raises(ConfigurationError, match=match):
        AdapterStore(model, root, **options)


def test_the_line_for_the_start(model: Any, root: Path) -> None:
    store = AdapterStore(model, root, host_bytes=100 * PACKED_BYTES)
    modules = [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "v")]
    assert store.describe(8, modules) == (
        "of rank 8 on 2 layers: device 16 (0.0 MB each), host 100 (0.0 MB each), disk 10 found, "
        "network 0 in the catalogue; of other kinds: device 16"
    )
    with pytest.raises(ConfigurationError, match="a rank from 1 to 256"):
        store.describe(300)
    store.close()


def test_loading_does_not_make_other_requests_wait(model: Any, root: Path, no_racy_files: None) -> None:
    """A step continues while another adapter is still being read from disk."""
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    (loan,) = held(store, bell, "a1")
    with held_up(host_module, "pack") as (_, go_on):
        stuck = store.reserve("a2")
        assert answers(store, model, [loan.adapter_index]) == [code_of(1)]
        assert store.reserve("a1").is_ready()
        assert not stuck.is_ready()
        go_on.set()
        bell.wait_for(stuck)
    assert answers(store, model, [stuck.adapter_index]) == [code_of(2)]
    store.close()


# ---- from the files to a loan ----------------------------------------------------------------------------------------


def test_an_adapters_files_are_opened_and_parsed_once(
    model: Any, root: Path, no_racy_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell, openings = Bell(), Openings(monkeypatch)
    store = AdapterStore(model, root, on_ready=bell)
    held(store, bell, "a1")
    openings.assert_once()
    assert store.reserve("a1").is_ready()  # looks at the files' stamp only
    assert len(openings.parsed) == 2
    store.close()
    assert open_files() == []


def test_an_adapter_that_is_preloaded_is_opened_once(
    model: Any, root: Path, no_racy_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Openings(monkeypatch)
    store = AdapterStore(model, root, preload=["a1"])
    openings.assert_once()
    store.close()
    assert open_files() == []


def test_requests_for_an_adapter_that_is_not_known_yet_read_it_once(
    model: Any, root: Path, no_racy_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell, reads = Bell(), Reads(monkeypatch)
    store = AdapterStore(model, root, on_ready=bell)
    with held_up(host_module, "pack") as (_, go_on):
        loans = [store.reserve("a1") for _ in range(5)]
        go_on.set()
        bell.wait_for(*loans)
    assert reads.names == ["a1"]
    assert {loan.digest for loan in loans} == {loans[0].digest}
    store.close()


def test_few_files_are_open_however_many_adapters_wait(model: Any, root: Path, no_racy_files: None) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    with held_up(host_module, "pack") as (_, go_on):
        loans = [store.reserve(f"a{at % NUM_ADAPTERS}") for at in range(3 * MOST_OPEN)]
        assert len(open_files()) == 2 * MOST_OPEN
        go_on.set()
        bell.wait_for(*loans)
    store.loader.submit(lambda: None).result()
    assert open_files() == []
    assert answers(store, model, sorted({loan.adapter_index for loan in loans}))
    store.close()


def test_a_store_that_is_closed_while_adapters_wait_leaves_no_file_open(model: Any, root: Path) -> None:
    store = AdapterStore(model, root, on_ready=Bell())
    with held_up(host_module, "pack") as (begun, go_on):
        loans = [store.reserve(f"a{number}") for number in range(4)]
        begun.wait()
        loans[2].release()
        closing = threading.Thread(target=store.close)
        closing.start()
        go_on.set()
        closing.join()
    assert open_files() == []
    with pytest.raises(ConfigurationError, match="closed"):
        store.reserve("a1")
    assert open_files() == []


def test_a_request_that_is_refused_leaves_no_file_open(model: Any, root: Path) -> None:
    store = AdapterStore(model, root, on_ready=Bell())
    (root / "a1" / CONFIG).write_text("{")
    for name in ("a1", "nobody"):
        with pytest.raises(ConfigurationError):
            store.reserve(name)
    assert open_files() == []
    store.close()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_changes_between_the_request_and_the_load_is_read_as_it_is_then(
    in_place: bool, model: Any, root: Path, no_racy_files: None
) -> None:
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell)
    with held_up(host_module, "pack") as (begun, go_on):
        first = store.reserve("a1")
        begun.wait()
        loan = store.reserve("a2")
        for file in (CONFIG, WEIGHTS):
            if in_place:
                shutil.copy(root / "a3" / file, root / "a2" / file)
            else:
                (root / "a3" / file).rename(root / "a2" / file)
        go_on.set()
        bell.wait_for(first, loan)
    assert answers(store, model, [first.adapter_index, loan.adapter_index]) == [code_of(1), code_of(3)]
    store.close()
