"""This module makes a scheme from a mask's name and options. It refuses pairs of mask and arithmetic that do not exist,
with an error of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from noise.blocks.pool import DEFAULT_BYTES, DEFAULT_DEVICE_BYTES, STEP_BYTES, default_bytes, default_disk_bytes
from noise.blocks.row_file import RowFile
from noise.disk.private_files import free_bytes
from noise.hints.store import DEFAULT_DROPPED_BITS, DEFAULT_RAM_BUDGET_BYTES, HintStore
from noise.ledger.ledger import Ledger
from noise.masks import gaussian_pool, off
from noise.masks.gaussian_pool import GaussianPool
from noise.masks.lattice import Lattice, packs_effects
from noise.masks.off import Off
from noise.masks.pad import Pad
from noise.masks.shares import Shares
from noise.options import (
    DEFAULT_PRECISION,
    MASKS,
    RING_ONLY,
    check_hints,
    check_num_providers,
    check_options,
    check_precision,
)
from noise.params import LatticeParameters, choose
from noise.scheme import GroupSpec, MaskScheme, WeightOf, product_call
from runtime.memory import free_memory
from wire.errors import ConfigurationError
from wire.frame import ITEM_BYTES, Arithmetic, Call, Direction, Purpose
from wire.limits import Limits
from wire.ring.kernels import EFFECT_BYTES

_HIDES_NOTHING = {"off": off.HIDES_NOTHING, "gaussian-pool": gaussian_pool.HIDES_NOTHING}
_ARITHMETIC = {"ring": Arithmetic.RING, "float": Arithmetic.FLOAT}


@dataclass(frozen=True)
class Setting:
    """Holds what a scheme may need of the session that makes it.

    Attributes:
        weights: the provider's weights, `int8` or `native`.
        offered: the arithmetics (`ring`, `float`) that the provider's manifest lists.
        open_ledger: opens this identity's ledger; only masks that count secrets call it.
        hints_folder: the folder in which lattice hints are kept.
        num_providers: how many URLs the client has.
        limits: the smallest of the providers' limits.
        verified: whether replies are checked before they reach a scheme.
        weight_of: returns the tenant's own quantised weight of a group; None if the tenant has no weights.
        features: how many numbers the masks and effects of one token have in the forward direction: the columns of
            requests and replies of all groups together.
        mask_device: the device that makes lattice masks; None for the CPU.
        pool_folder: the folder in which ready masks lie with `pool="disk"`; None for `masks` beside `hints_folder`.
    """

    weights: str
    offered: Collection[str]
    open_ledger: Callable[[], Ledger]
    hints_folder: Path
    num_providers: int = 1
    limits: Limits | None = None
    verified: bool = False
    weight_of: WeightOf | None = None
    features: int = 0
    mask_device: torch.device | None = None
    pool_folder: Path | None = None


def readable(mask: str) -> str | None:
    """Returns one line which says that a mask hides nothing, and what would; None for a mask that hides rows."""
    return _HIDES_NOTHING.get(mask)


def choose_arithmetic(mask: str, arithmetic: str | None, setting: Setting) -> str:
    """Returns the arithmetic that a session uses with a mask, or raises an error of one sentence if the pair does not
    exist.

    Raises:
        ConfigurationError: a name is unknown, the pair does not exist, the provider does not offer the arithmetic, or
            the number of providers is wrong.
    """
    if mask not in MASKS:
        raise ConfigurationError(f"mask is one of {', '.join(MASKS)}, got {mask!r}")
    if arithmetic not in (None, *_ARITHMETIC):
        raise ConfigurationError(f"arithmetic is ring or float, got {arithmetic!r}")
    if mask == "gaussian-pool" and arithmetic == "ring":
        raise ConfigurationError("mask='gaussian-pool' runs on float arithmetic only")
    if mask in RING_ONLY and arithmetic == "float":
        raise ConfigurationError(f"mask={mask!r} runs on ring arithmetic only")
    check_num_providers(mask, setting.num_providers)
    suits = "float" if mask == "gaussian-pool" or (mask == "off" and setting.weights == "native") else "ring"
    chosen = arithmetic or suits
    if chosen not in setting.offered:
        raise ConfigurationError(f"this provider does not offer {chosen} arithmetic")
    return chosen


def product_calls(
    scheme: MaskScheme, group: GroupSpec, direction: Direction, precision: str | None = None
) -> tuple[tuple[Call, int], ...]:
    """Returns the calls that a scheme's `mask` makes of the rows of one group, each with the index of its provider.
    They are the same for every row.

    Args:
        precision: how many bits of a masked number cross, if not what the scheme was made with.
    """
    if scheme.arithmetic is Arithmetic.FLOAT or scheme.name not in RING_ONLY:
        return ((Call(group.id, direction, scheme.arithmetic), 0),)
    asked = (product_call(group, direction, precision or scheme.precision), 0)
    if scheme.name != "shares":
        return (asked,)
    return asked, (Call(group.id, direction, Arithmetic.RING, Purpose.HINT), 1)


def make_scheme(mask: str, arithmetic: str | None, options: Mapping[str, Any], setting: Setting) -> MaskScheme:
    """Makes the mask scheme that a client chose.

    Args:
        mask: one of MASKS.
        arithmetic: `ring`, `float`, or None for the one that suits the mask and the provider's weights.
        options: the user's options, which become keyword arguments of the scheme.
        setting: what the scheme may need of the session.

    Raises:
        ConfigurationError: `choose_arithmetic` raised it, an option is unknown or its value not allowed, mask='pad' has
            no weights, the ledger cannot be opened, or ready masks cannot lie in a file.
        StorageError: the disk has no room for a file of ready masks.
        WeakParameters: the lattice parameters are refused; see `noise.params.choose`.
    """
    chosen = choose_arithmetic(mask, arithmetic, setting)
    makers: dict[str, Callable[..., MaskScheme]] = {
        "lattice": make_lattice, "pad": make_pad, "shares": make_shares, "gaussian-pool": _make_gaussian_pool,
        "off": lambda _: Off(_ARITHMETIC[chosen]),
    }  # fmt: skip
    given = check_options(mask, options)
    check_precision(given, setting.verified)
    if mask == "lattice" and setting.mask_device is not None and given.get("pool") == "disk":
        raise ConfigurationError(
            f"pool='disk' is for masks that the CPU makes, and this client makes them on {setting.mask_device}: leave "
            "pool= (--pool) out, or choose device='cpu'"
        )
    if mask == "lattice" and setting.mask_device is not None and given.get("pool_bytes") is None:
        given["pool_bytes"] = DEFAULT_DEVICE_BYTES  # Masks stay in the device's memory.
    return makers[mask](setting, **given)


def _make_gaussian_pool(setting: Setting, **options: Any) -> MaskScheme:
    """Makes the mask `gaussian-pool`, whose options these are."""
    return GaussianPool(**options)


def make_shares(setting: Setting, precision: str = DEFAULT_PRECISION) -> MaskScheme:
    """Makes the mask `shares`, whose option this is."""
    ledger = setting.open_ledger()
    return Shares(lambda: ledger.fresh_seed("shares"), ledger.close, precision)


def _make_pool(
    setting: Setting, pool: str, pool_bytes: int | None, is_steady: bool = False, effect_bytes: int = ITEM_BYTES
) -> tuple[int, RowFile | None]:
    """Returns the size of a pool, and its file if it has one.

    Args:
        is_steady: whether the default size must not follow what the machine has free.
        effect_bytes: see `MaskPool`.
    """
    if pool == "memory":
        default = DEFAULT_BYTES if is_steady else default_bytes(setting.features, free_memory(), effect_bytes)
        return default if pool_bytes is None else pool_bytes, None
    folder = setting.pool_folder or setting.hints_folder.with_name("masks")
    if pool_bytes is None:
        pool_bytes = default_disk_bytes(setting.features, None if is_steady else free_bytes(folder), effect_bytes)
    return pool_bytes, RowFile(folder, pool_bytes)


def make_pad(
    setting: Setting,
    pool_bytes: int | None = None,
    background: bool = True,
    pool: str = "memory",
    precision: str = DEFAULT_PRECISION,
) -> MaskScheme:
    """Makes the mask `pad`, whose options these are."""
    if setting.weight_of is None:
        raise ConfigurationError("mask='pad' needs the tenant's own weights: verify='path or hub id' names them")
    budget, file = _make_pool(setting, pool, pool_bytes)
    ledger = _ledger(setting, file)
    return Pad(
        setting.weight_of, lambda: ledger.fresh_seed("pad"), budget, background, ledger.close, setting.features, file,
        precision=precision,
    )  # fmt: skip


def _ledger(setting: Setting, file: RowFile | None) -> Ledger:
    try:
        return setting.open_ledger()
    except BaseException:
        if file is not None:
            file.close()
        raise


def make_lattice(
    setting: Setting,
    parameters: str | LatticeParameters = "default",
    allow_toy: bool = False,
    hints: str | None = None,
    hint_bits: int = 32 - DEFAULT_DROPPED_BITS,
    hint_ram_bytes: int = DEFAULT_RAM_BUDGET_BYTES,
    pool_bytes: int | None = None,
    background: bool = True,
    pool: str = "memory",
    precision: str = DEFAULT_PRECISION,
) -> MaskScheme:
    """Makes the mask `lattice`, whose options these are."""
    chosen = choose(parameters, allow_toy)
    check_hints({"hints": hints}, setting.verified)
    folder = setting.hints_folder if hints != "stream" else None
    hints_from = "fetched" if folder is None or not setting.verified else hints
    store = HintStore(folder, 32 - hint_bits, hint_ram_bytes)
    # How often a hint that is not stored is fetched follows the budget, so the provider would see free memory.
    effect_bytes = EFFECT_BYTES if packs_effects(store, setting.mask_device) else ITEM_BYTES
    budget, file = _make_pool(setting, pool, pool_bytes, is_steady=folder is None, effect_bytes=effect_bytes)
    # A hint that is not stored is fetched for every block, so blocks for several steps are made together.
    is_default = pool_bytes is None and file is None and folder is not None
    return Lattice(
        chosen, _ledger(setting, file), store, setting.verified, budget, background, setting.limits, setting.features,
        setting.mask_device, file, precision, hints_from, STEP_BYTES if is_default else None,
    )  # fmt: skip
