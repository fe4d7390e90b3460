"""Tests a thousand random adapters that each answer with a code of their own: a request that gets another's adapter
fails the test."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import (
    Bell,
    answers,
    code_of,
    coded_model,
    held,
    save_coded,
)

NUM_ADAPTERS, AT_ONCE = 1000, 16
NUM_BUSY = 40
"""The number of adapters in the test with threads."""


@pytest.fixture(scope="module")
def model() -> Any:
    return coded_model()


@pytest.fixture(scope="module")
def root(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chosen = tmp_path_factory.mktemp("thousand"), random.Random(0)
    for number in range(NUM_ADAPTERS):
        save_coded(model, folder / f"a{number}", code_of(number), chosen.randint(8, 64), seed=number)
    return folder


def test_codes_differ() -> None:
    assert len({code_of(number) for number in range(NUM_ADAPTERS)}) == NUM_ADAPTERS


def test_a_thousand_at_random(model: Any, root: Path) -> None:
    bell, chosen = Bell(), random.Random(1)
    store = AdapterStore(model, root, on_ready=bell, host_bytes=1 << 20)  # about a hundred of them
    numbers = [*range(NUM_ADAPTERS), *(chosen.randrange(NUM_ADAPTERS) for _ in range(200))]
    chosen.shuffle(numbers)
    for begin in range(0, len(numbers), AT_ONCE):
        some = numbers[begin : begin + AT_ONCE]
        loans = held(store, bell, *(f"a{number}" for number in some))
        indices = [loan.adapter_index for loan in loans]
        assert answers(store, model, indices) == [code_of(number) for number in some]
        if begin == 0:  # the check can fail: others' places answer others' codes
            turned = indices[1:] + indices[:1]
            assert all(got != code_of(number) for got, number in zip(answers(store, model, turned), some, strict=True))
            assert all(
                code != code_of(number) for code, number in zip(answers(store, model, [0] * 16), some, strict=True)
            )
        for loan in loans:
            loan.release()
    status = store.status()
    assert status.device_held == 0
    assert 0 < status.host_bytes <= 1 << 20
    assert status.disk_adapters == NUM_ADAPTERS
    store.close()


def test_places_that_are_used_again_under_load_never_give_anothers_adapter(model: Any, root: Path) -> None:
    """There are four threads, three places of each rank, and a host tier that holds few adapters, so that adapters are
    replaced all the time."""
    bell = Bell()
    store = AdapterStore(model, root, on_ready=bell, device_slots=3, host_bytes=60_000)
    num_places = store.status().device_reusable
    wrong: list[object] = []

    def client(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            for _ in range(60):
                number = chosen.randrange(NUM_BUSY)
                (loan,) = held(store, bell, f"a{number}")
                if answers(store, model, [loan.adapter_index]) != [code_of(number)]:
                    wrong.append(number)
                loan.release()
        except BaseException as exc:  # noqa: BLE001 - the test shows it
            wrong.append(exc)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.status().device_held == store.status().waiting == 0
    assert store.status().device_reusable == num_places
    store.close()


def test_an_adapter_that_changes_on_disk_is_a_new_one(model: Any, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "a1", tmp_path / "one")
    bell = Bell()
    store = AdapterStore(model, tmp_path, on_ready=bell)
    (old,) = held(store, bell, "one")
    for number in (2, 3, 4):
        for file in (root / f"a{number}").iterdir():
            shutil.copy(file, tmp_path / "one" / file.name)
        (new,) = held(store, bell, "one")
        assert new.digest != old.digest
        assert answers(store, model, [old.adapter_index, new.adapter_index]) == [code_of(number - 1), code_of(number)]
        old.release()
        old = new
    store.close()
