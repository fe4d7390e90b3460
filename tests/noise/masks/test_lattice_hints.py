"""Tests seeds, budgets and hints of the lattice mask, and everything that can go wrong with them."""

from __future__ import annotations

import copy
import gc
import hashlib
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from noise import sampling
from noise.blocks.pool import DEFAULT_BYTES, Block, MaskPool
from noise.blocks.slots import Slots
from noise.hints import local
from noise.ledger.ledger import Book, Ledger, Reservation, Seed
from noise.masks import lattice
from noise.masks.lattice import Lattice
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from noise.sampling import Csprng
from tests.support.lattice import BACKWARD, DEFAULT, FORWARD, TOY, Provider, bounds, rows_of, sent, weight_of, wide
from tests.support.reachable import reachable
from tests.support.waiting import WAIT_S, end
from wire.errors import ConfigurationError, MaskError, Unavailable, VerificationFailed
from wire.limits import Limits

# ---- seeds and budgets ----------------------------------------------------------------------------------------------


class Few(LatticeParameters):
    """Defines toy parameters whose seeds serve only a few secrets."""

    budget = 4

    @property
    def max_secrets(self) -> int:
        return self.budget


@pytest.mark.parametrize("budget", [1, 4, 13, 70])
def test_a_seed_that_has_served_its_budget_is_replaced_with_its_hints(
    make: Any, provider: Provider, counted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(Few, "budget", budget)
    few = Few("few", 16, 2, 3.2, 0, "a test", toy=True)
    scheme, spec = make(few), provider.groups[0]
    folders: list[set[str]] = []
    for turn in range(6):
        rows = rows_of(16 * 23, 40, turn)
        exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, few, 128)
        assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())
        folders.append({path.name for path in (tmp_path / "hints").iterdir()})
    seeds = counted()
    assert all(seed.used <= budget for seed in seeds)
    assert sum(seed.used for seed in seeds) >= 6 * 23
    fetched = [rows.seed for call, rows in provider.hints if rows.first_row == 0]
    assert len(fetched) == len(set(fetched)), "a seed's hint is fetched once"
    assert set(fetched) <= {seed.seed for seed in seeds}
    current = hashlib.sha256(fetched[-1]).hexdigest()
    assert folders[-1] == {current[:24]}, "hints of earlier seeds are deleted"
    assert len(seeds) >= 6 * 23 // max(budget, 1)


def test_a_restart_goes_on_with_the_seed_and_its_hints(make: Any, provider: Provider, counted: Any) -> None:
    spec, rows = provider.groups[0], rows_of(2, 40)
    first = make()
    first.mask(spec, FORWARD, rows)
    asked = len(provider.hints)
    second = make()
    second.mask(spec, FORWARD, rows)
    assert len(provider.hints) == asked
    (seed,) = counted()
    assert seed.used == 2 * lattice.BLOCKS_RESERVED_AT_ONCE


def test_streamed_hints_leave_no_file(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme, spec, rows = make(folder=None), provider.groups[0], rows_of(3, 40)
    got = provider.answer(scheme.mask(spec, FORWARD, rows))
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 0)
    assert bool(((wide(got) - exact).abs() <= bound).all())
    assert {path.name for path in tmp_path.iterdir()} == {"ledger", "ledger.lock"}
    assert not scheme.keeps_hints
    assert scheme.describe()["hints"] == "streamed, not stored"


def test_hints_are_asked_for_within_the_providers_limits(make: Any, provider: Provider) -> None:
    scheme = make(limits=Limits(max_rows=100, max_tensor_bytes=64 * 40 * 4))
    scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    assert max(rows.num_rows for _, rows in provider.hints) == 64
    assert sum(rows.num_rows for _, rows in provider.hints) == DEFAULT.dimension


# ---- hints that the tenant computes ----------------------------------------------------------------------------------


def every(provider: Provider) -> list[Any]:
    return [(group, direction) for group in provider.groups for direction in (FORWARD, BACKWARD)]


def test_the_link_is_measured_by_forward_hints_under_a_seed_of_its_own(
    make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider may allow a tenant no backward hints."""
    monkeypatch.setattr(local, "SMALL_BYTES", 0)
    monkeypatch.setattr(local, "product_speed", lambda: 1e30)
    scheme = make(verified=True, hints_from=None)
    said = scheme.settle_hints(lambda number: provider.weights[number], every(provider))
    assert said is not None
    assert scheme.computes_hints
    assert {(call.group, call.direction) for call, _ in provider.hints} == {(1, FORWARD)}
    measured = len(provider.hints)
    rows = rows_of(3, 40)
    exact, bound, _ = bounds(provider.groups[0], FORWARD, provider.weights[0], rows, DEFAULT, 128)
    got = provider.answer(scheme.mask(provider.groups[0], FORWARD, rows))
    assert bool(((wide(got) - exact).abs() <= bound).all())
    assert len(provider.hints) == measured
    assert scheme.seed not in {rows.seed for _, rows in provider.hints}


def test_a_slow_machine_fetches(make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SMALL_BYTES", 0)
    monkeypatch.setattr(local, "product_speed", lambda: 1.0)
    scheme = make(verified=True, hints_from=None)
    said = scheme.settle_hints(lambda number: provider.weights[number], every(provider))
    assert said.startswith("hints of the mask are fetched from the provider: ")
    assert not scheme.computes_hints
    scheme.mask(provider.groups[0], FORWARD, rows_of(3, 40))
    assert scheme.seed in {rows.seed for _, rows in provider.hints}


def test_a_choice_without_weights(make: Any, provider: Provider) -> None:
    with pytest.raises(ConfigurationError, match="needs prepared weights"):
        make(verified=True, hints_from="local").settle_hints(None, every(provider))
    scheme = make(verified=True, hints_from=None)
    assert scheme.settle_hints(None, every(provider)) is None
    assert not scheme.computes_hints
    assert provider.hints == []


# ---- bad days -------------------------------------------------------------------------------------------------------


def test_a_provider_that_goes_away_while_a_hint_is_fetched(make: Any, provider: Provider) -> None:
    scheme, spec, rows = make(limits=Limits(max_rows=256), background=True), provider.groups[0], rows_of(2, 40)

    def gone() -> None:
        if len(provider.hints) == 4:
            raise Unavailable("gone")

    provider.fail = gone
    with pytest.raises(Unavailable, match="gone"):
        scheme.mask(spec, FORWARD, rows)
    provider.fail = lambda: None
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())


def test_a_damaged_hint_file_is_an_error_and_nothing_is_masked(make: Any, provider: Provider, tmp_path: Path) -> None:
    spec, rows = provider.groups[0], rows_of(2, 40)
    make().mask(spec, FORWARD, rows)
    (file,) = (tmp_path / "hints").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    scheme = make()
    for _ in range(2):
        with pytest.raises(MaskError, match="delete it, and it will be made again"):
            scheme.mask(spec, FORWARD, rows)
    file.unlink()
    scheme = make()
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())


def test_hints_of_another_weight_or_seed_are_refused(make: Any, provider: Provider, tmp_path: Path) -> None:
    other = Provider([weight_of(40, 24, 9)])
    mine, theirs = make(TOY), make(LatticeParameters("other", 16, 2, 3.2, 0, "a test", toy=True))
    theirs.bind(other.effect)
    theirs.mask(other.groups[0], FORWARD, rows_of(1, 40))
    (foreign,) = (tmp_path / "hints").glob("*/*.safetensors")
    mine.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    (own,) = set((tmp_path / "hints").glob("*/*.safetensors")) - {foreign}
    own.write_bytes(foreign.read_bytes())
    again = make(TOY)
    with pytest.raises(MaskError, match="another model, seed or setting"):
        again.mask(provider.groups[0], FORWARD, rows_of(1, 40))


def test_a_ledger_that_breaks_stops_everything(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme, spec = make(TOY), provider.groups[0]
    path = tmp_path / "ledger"
    path.write_bytes(path.read_bytes() + b"0123456789abcdef {}\n")
    asked = len(provider.hints)
    with pytest.raises(ConfigurationError, match="damaged"):
        scheme.mask(spec, FORWARD, rows_of(1, 40))
    assert len(provider.hints) == asked
    assert scheme.describe()["secrets"] == "the ledger cannot be read"


def test_a_failed_check_of_a_hint_ends_it_there(make: Any, provider: Provider, tmp_path: Path) -> None:
    scheme = make(verified=True)

    def forged() -> None:
        raise VerificationFailed("forged")

    provider.fail = forged
    with pytest.raises(VerificationFailed, match="forged"):
        scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    assert not list((tmp_path / "hints").glob("*/*.safetensors"))


def test_use_before_a_connection_and_after_the_end(make: Any, provider: Provider) -> None:
    scheme, spec = make(), provider.groups[0]
    scheme.mask(spec, FORWARD, rows_of(1, 40))
    scheme.close()
    assert scheme.pool.ready_bytes == 0
    with pytest.raises(MaskError, match="closed"):
        scheme.mask(spec, FORWARD, rows_of(1, 40))
    scheme.close()
    unbound = make(is_bound=False)
    with pytest.raises(ConfigurationError, match="before its client had a connection"):
        unbound.mask(spec, FORWARD, rows_of(1, 40))


def test_secrets_do_not_outlive_the_making(make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the mask and its effect are kept. Secrets, errors and the transforms of secrets are dropped."""
    kept: list[weakref.ref[torch.Tensor]] = []
    for module, name in ((sampling, "ternary"), (sampling, "error"), (negacyclic, "secret_transform")):
        original = getattr(module, name)

        def spy(*arguments: Any, original: Any = original) -> torch.Tensor:
            made: torch.Tensor = original(*arguments)
            kept.append(weakref.ref(made))
            return made

        monkeypatch.setattr(module, name, spy)
    scheme = make()
    scheme.mask(provider.groups[0], FORWARD, rows_of(1, 40))
    gc.collect()
    assert len(kept) >= 3  # errors are drawn a few columns at a time
    assert [each() for each in kept] == [None] * len(kept)


SECRETIVE = ("noise.masks.lattice", "noise.blocks.", "noise.sampling", "noise.ledger.ledger")
"""The modules whose objects hold secrets or make them. All other objects that a mask keeps hold public facts."""
PUBLIC = (Seed, Book)
"""The classes of these modules whose objects hold public facts: seeds of public matrices, and numbers of used rows."""


@pytest.mark.parametrize("options", [{}, {"pool_bytes": 4 * 64 * 200, "features": 64}], ids=["blocks", "pieces"])
def test_nothing_can_be_pickled_copied_or_printed(
    make: Any, provider: Provider, counted: Any, options: dict[str, int]
) -> None:
    scheme, rows = make(**options), rows_of(2, 40)
    masked = scheme.mask(provider.groups[0], FORWARD, rows)
    kept = [each for each in reachable(scheme, object) if type(each).__module__.startswith(SECRETIVE)]
    kept = [each for each in kept if not isinstance(each, PUBLIC)]
    assert {Lattice, MaskPool, Block, Slots, Csprng, Ledger, Reservation} <= {type(each) for each in kept}
    for secret in kept:
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                duplicate(secret)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(masked)
    (block,) = reachable(scheme, Block)
    numbers = [str(int(number)) for number in (*sent(masked)[0], *block.mask[1], *block.effect[1])]
    text = "".join(map(repr, (*kept, *reachable(scheme, Seed), masked)))
    assert not any(number in text for number in numbers if len(number) > 5)
    assert "tensor" not in text
    (seed,) = counted()
    assert seed.seed.hex() not in text


def test_it_says_what_is_in_force(make: Any, provider: Provider) -> None:
    scheme = make()
    scheme.prepare(provider.groups[0], FORWARD, 1)
    said = scheme.describe()
    assert "Module-LWE" in said["assumption"]
    assert said["parameters"] == "default: q=2^32, 3x512, sigma=3.2"
    assert said["bits"].startswith("161 ")
    assert said["secrets"].startswith(f"{lattice.BLOCKS_RESERVED_AT_ONCE} of {2**33} ")
    assert "24 bits" in said["hints"]
    assert f" of {DEFAULT_BYTES / 1e6:.0f} MB of masks and effects ready" in said["pool"]
    assert "at least 512 rows in each of 1 " in said["pool"]


def test_closing_while_the_worker_makes_masks(make: Any, provider: Provider) -> None:
    before = set(threading.enumerate())
    scheme, spec = make(folder=None, hint_ram_bytes=0, background=True), provider.groups[0]
    scheme.prepare(spec, FORWARD, 512)
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    provider.fail = hold
    scheme.mask(spec, FORWARD, rows_of(511, 40))
    assert reached.wait(WAIT_S), "the worker asks the provider, since no hint is kept"
    scheme.close()
    (worker,) = (each for each in set(threading.enumerate()) - before if each.name == "veilbase-masks")
    go_on.set()
    end(worker)
    assert scheme.pool.ready_bytes == 0
