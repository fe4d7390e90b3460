"""Tests the options of each mask: unknown and wrong options are named, and an error inside a mask is not mistaken for
one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from noise import registry
from noise.blocks.pool import STEP_BYTES
from noise.disk import private_files
from noise.hints.file import Layout
from noise.ledger.ledger import Ledger
from noise.masks.gaussian_pool import GaussianPool, NotPrivateWarning
from noise.options import MASKS, OPTIONS, check_options
from noise.params import LatticeParameters
from noise.registry import Setting, make_scheme
from wire.errors import ConfigurationError

MAKERS: dict[str, Callable[..., Any]] = {
    "lattice": registry.make_lattice,
    "pad": registry.make_pad,
    "shares": registry.make_shares,
    "gaussian-pool": GaussianPool,
    "off": lambda setting: None,
}
MADE = {"lattice": "Lattice", "pad": "Pad", "shares": "Shares", "gaussian-pool": "GaussianPool", "off": "Off"}
OWN = LatticeParameters("own", 512, 3, 3.2, 161, "a test")
SHAPELESS = LatticeParameters("own", "512", 3, 3.2, 161, "a test")  # type: ignore[arg-type]
FITTING: list[tuple[str, dict[str, Any]]] = [
    ("lattice", {"parameters": OWN, "allow_toy": False, "hints": "stream", "hint_bits": 20, "hint_ram_bytes": 0}),
    ("lattice", {"hints": None}),
    ("lattice", {"hints": "fetched"}),
    ("lattice", {"parameters": "lean", "hint_bits": 32, "pool_bytes": 0, "background": False}),
    ("lattice", {"pool": "disk", "pool_bytes": 1 << 20}),
    ("pad", {"pool_bytes": 1 << 40, "background": False}),
    ("pad", {"pool_bytes": 0, "background": False, "pool": "disk"}),
    ("shares", {}),
    ("gaussian-pool", {"pool_size": 1, "sigma": 3, "renew_every": 1}),
    ("off", {}),
]
WRONG: list[tuple[str, str, Any, str, str]] = [
    ("lattice", "parameters", 5, "name of a parameter set", "got 5"),
    ("lattice", "parameters", SHAPELESS, "LatticeParameters of numbers", "got a value of type LatticeParameters"),
    ("lattice", "allow_toy", "no", "True or False", "got 'no'"),
    ("lattice", "hints", "memory", "'local', 'fetched', 'stream' or None", "got 'memory'"),
    ("lattice", "hints", ["disk"], "'local', 'fetched', 'stream' or None", "got a value of type list"),
    ("lattice", "hint_bits", 23, "32, 24, 22 or 20", "got 23"),
    ("lattice", "hint_bits", 24.0, "32, 24, 22 or 20", "got 24.0"),
    ("lattice", "hint_bits", "24", "32, 24, 22 or 20", "got '24'"),
    ("lattice", "hint_bits", None, "32, 24, 22 or 20", "got None"),
    ("lattice", "hint_ram_bytes", -1, "whole number of bytes from 0", "got -1"),
    ("lattice", "hint_ram_bytes", "4 GiB", "whole number of bytes from 0", "got '4 GiB'"),
    ("lattice", "pool_bytes", 1e9, "whole number of bytes from 0", "got 1000000000.0"),
    ("lattice", "pool_bytes", True, "whole number of bytes from 0", "got True"),
    ("lattice", "background", torch.zeros(99), "True or False", "got a value of type Tensor"),
    ("lattice", "pool", "tape", "'memory' or 'disk'", "got 'tape'"),
    ("lattice", "pool", None, "'memory' or 'disk'", "got None"),
    ("pad", "pool", ["disk"], "'memory' or 'disk'", "got a value of type list"),
    ("pad", "pool_bytes", -(1 << 40), "whole number of bytes from 0", "got -1099511627776"),
    ("pad", "pool_bytes", -(10**5000), "whole number of bytes from 0", "got a number of 16610 bits"),
    ("pad", "background", 1, "True or False", "got 1"),
    ("gaussian-pool", "pool_size", 0, "whole number from 1", "got 0"),
    ("gaussian-pool", "pool_size", "8", "whole number from 1", "got '8'"),
    ("gaussian-pool", "sigma", float("nan"), "finite number above 0", "got nan"),
    ("gaussian-pool", "sigma", "x" * 10_000, "finite number above 0", "got a text of 10000 characters"),
    ("gaussian-pool", "sigma", 10**400, "finite number above 0", "got a number of 1329 bits"),
    ("gaussian-pool", "sigma", 1j, "finite number above 0", "got a value of type complex"),
    ("gaussian-pool", "renew_every", 0.5, "whole number from 1", "got 0.5"),
]


def setting(mask: str, folder: Path) -> Setting:
    return Setting(
        "int8", ("ring", "float"), lambda: Ledger.open(folder / "ledger", "tenant"), folder / "hints",
        num_providers=2 if mask == "shares" else 1, weight_of=lambda _: torch.zeros(2, 2, dtype=torch.int8),
    )  # fmt: skip


def refusal(mask: str, options: Any, folder: Path) -> str:
    """Returns the line with which a mask is refused before its ledger is opened."""
    with pytest.raises(ConfigurationError) as failure:
        make_scheme(mask, None, options, setting(mask, folder))
    assert not list(folder.iterdir()), "something was opened or written for a mask that is refused"
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) < 200
    return str(failure.value)


@pytest.mark.parametrize("mask", MASKS)
def test_the_table_has_the_options_of_the_maker(mask: str) -> None:
    taken = [name for name in inspect.signature(MAKERS[mask]).parameters if name != "setting"]
    assert list(OPTIONS[mask]) == taken


@pytest.mark.parametrize("mask", MASKS)
def test_defaults_fit(mask: str) -> None:
    defaults = {
        name: each.default for name, each in inspect.signature(MAKERS[mask]).parameters.items() if name != "setting"
    }
    assert check_options(mask, defaults) == defaults


@pytest.mark.parametrize(("mask", "options"), FITTING, ids=str)
def test_options_that_fit(mask: str, options: dict[str, Any], tmp_path: Path) -> None:
    if mask == "gaussian-pool":
        with pytest.warns(NotPrivateWarning):
            scheme = make_scheme(mask, None, options, setting(mask, tmp_path))
    else:
        scheme = make_scheme(mask, None, options, setting(mask, tmp_path))
    assert scheme.name == mask
    scheme.close()


@pytest.mark.parametrize(
    ("device", "options", "size"),
    [
        (None, {}, 100 << 20),  # a tenth of the free memory
        (None, {"pool_bytes": None}, 100 << 20),
        (None, {"pool_bytes": 9}, 9),
        (None, {"hints": "stream"}, 2 << 30),  # what is fetched again does not tell how much memory is free
        ("cpu", {}, 512 << 20),
        ("cpu", {"pool_bytes": None}, 512 << 20),
        ("cpu", {"pool_bytes": 9}, 9),
    ],
)
def test_the_pools_size_follows_where_masks_are(
    device: str | None, options: dict[str, Any], size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's `cpu` device stands in for a GPU."""
    made: list[Any] = []
    monkeypatch.setattr(registry, "free_memory", lambda: 1000 << 20)
    monkeypatch.setattr(registry, "Lattice", lambda *given: made.append(given))
    where = None if device is None else torch.device(device)
    make_scheme("lattice", None, options, replace(setting("lattice", tmp_path), mask_device=where))
    assert size in made[0]
    assert made[0][8:10] == (where, None)


@pytest.mark.parametrize(
    ("options", "features", "size"),
    [
        ({}, 100_000, 1024 * 100_000 * (4 + 3) // 2),  # effects take three bytes a number
        ({"hint_bits": 32}, 100_000, 1024 * 100_000 * 4),
        ({}, 1_000_000, 2500 << 20),  # a quarter of the free disk
        ({"hints": "stream"}, 1_000_000, 1024 * 1_000_000 * 4),  # what is fetched again tells nothing of free space
        ({"pool_bytes": 4096}, 100_000, 4096),
    ],
)
def test_a_file_of_masks_has_a_size_and_a_place(
    options: dict[str, Any], features: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Path, int]] = []
    made: list[Any] = []
    monkeypatch.setattr(private_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000 << 20))
    monkeypatch.setattr(registry, "RowFile", lambda *given: opened.append(given) or "file")
    monkeypatch.setattr(registry, "Lattice", lambda *given: made.append(given))
    given = replace(setting("lattice", tmp_path), features=features)
    make_scheme("lattice", None, {"pool": "disk", **options}, given)
    make_scheme("lattice", None, {"pool": "disk", **options}, replace(given, pool_folder=tmp_path / "there"))
    assert opened == [(tmp_path / "masks", size), (tmp_path / "there", size)]
    assert all(size in each and each[9] == "file" for each in made)


@pytest.mark.parametrize("pool_bytes", [None, 9])
def test_a_file_is_not_for_masks_of_a_device(pool_bytes: int | None, tmp_path: Path) -> None:
    """Torch's `cpu` device stands in for a GPU."""
    given = replace(setting("lattice", tmp_path), mask_device=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="for masks that the CPU makes") as failure:
        make_scheme("lattice", None, {"pool": "disk", "pool_bytes": pool_bytes}, given)
    assert "\n" not in str(failure.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask", ["lattice", "pad"])
def test_a_ledger_that_cannot_be_opened_leaves_no_file(
    mask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    real = registry.RowFile
    monkeypatch.setattr(registry, "RowFile", lambda *given: opened.append(real(*given)) or opened[-1])

    def refuse() -> Ledger:
        raise ConfigurationError("no ledger")

    with pytest.raises(ConfigurationError, match="no ledger"):
        make_scheme(mask, None, {"pool": "disk"}, replace(setting(mask, tmp_path), open_ledger=refuse))
    assert [file.is_closed for file in opened] == [True]


@pytest.mark.parametrize(
    ("hints", "verified", "hints_from"),
    [(None, False, "fetched"), (None, True, None), ("local", True, "local"), ("fetched", True, "fetched"),
     ("stream", True, "fetched")],
)  # fmt: skip
def test_where_hints_come_from_is_left_open_only_with_weights_to_trust(
    hints: str | None, verified: bool, hints_from: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(registry, "Lattice", lambda *given: made.append(given))
    make_scheme("lattice", None, {"hints": hints}, replace(setting("lattice", tmp_path), verified=verified))
    assert made[0][-2] == hints_from


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, STEP_BYTES), ({"pool_bytes": 1 << 31}, None), ({"pool": "disk"}, None), ({"hints": "stream"}, None)],
)
def test_little_is_made_ahead_for_training_by_default(
    options: dict[str, Any], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hints that are not kept, blocks for several steps share what is fetched."""
    made: list[Any] = []
    monkeypatch.setattr(registry, "Lattice", lambda *given: made.append(given))
    make_scheme("lattice", None, options, setting("lattice", tmp_path))
    assert made[0][-1] == expected


def test_local_hints_need_weights_to_trust(tmp_path: Path) -> None:
    assert "needs verify= (--verify)" in refusal("lattice", {"hints": "local"}, tmp_path)


@pytest.mark.parametrize(
    ("mask", "option", "meant"),
    [("lattice", {"hint_bit": 24}, "hint_bits"), ("pad", {"pool_byte": 9}, "pool_bytes"),
     ("lattice", {"parameters": "conservativ"}, "conservative")],
)  # fmt: skip
def test_a_misspelt_option_names_the_nearest(mask: str, option: dict[str, Any], meant: str, tmp_path: Path) -> None:
    assert refusal(mask, option, tmp_path).endswith(f" did you mean {meant}?")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "unknown", ["no_such_option", "setting", "x" * 10_000, 5], ids=["own", "inner", "long", "number"]
)
def test_an_unknown_option_is_named(mask: str, unknown: Any, tmp_path: Path) -> None:
    known = {"background": False} if "background" in OPTIONS[mask] else {}
    said = refusal(mask, known | {unknown: 1}, tmp_path)
    shown = "a text of 10000 characters" if unknown == "x" * 10_000 else repr(unknown)
    assert f"mask={mask!r} has no option {shown}: it takes " in said
    assert all(name in said for name in OPTIONS[mask])
    assert OPTIONS[mask] or said.endswith("it takes none")


@pytest.mark.parametrize(
    ("mask", "option", "value", "expected", "got"),
    WRONG,
    ids=[f"{mask}-{option}-{n}" for n, (mask, option, *_) in enumerate(WRONG)],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    mask: str, option: str, value: Any, expected: str, got: str, tmp_path: Path
) -> None:
    said = refusal(mask, {option: value}, tmp_path)
    assert said.startswith(f"{option} of mask={mask!r} is ")
    assert expected in said
    assert said.endswith(got)


@pytest.mark.parametrize("options", [[], 5, "hints", [("hints", "disk")]], ids=str)
def test_options_that_are_no_mapping(options: Any, tmp_path: Path) -> None:
    assert "mask_options is a mapping" in refusal("lattice", options, tmp_path)


@pytest.mark.parametrize("mask", MASKS)
def test_a_fault_inside_the_mask_comes_through_as_what_it_is(
    mask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any, **__: Any) -> Any:
        return len(None)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, MADE[mask], faulty)
    with pytest.raises(TypeError, match="has no len"):
        make_scheme(mask, None, {}, setting(mask, tmp_path))


@pytest.mark.parametrize("bits", range(16, 33))
def test_the_table_allows_what_a_hint_file_can_store(bits: int) -> None:
    try:
        Layout(1, 1, 32 - bits)
    except ConfigurationError:
        assert not OPTIONS["lattice"]["hint_bits"].fits(bits)
    else:
        assert OPTIONS["lattice"]["hint_bits"].fits(bits)
