"""This module decides which base layers the tenant computes itself, from its own checkpoint or from weights that the
provider gives away, in place of sending their rows to the provider (`TenantClient(keep=...)`, docs/keep.md).

Guarantees: the choice depends on the tenant's setting and on names in the provider's manifest, and on nothing else, so
what a provider sees of it is the same for every text, adapter and data set. A name that no layer has is refused, and
so is part of a group, whose layers share one call. Importing this module does not load torch.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.command_line import nearest
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from wire.manifest import LayerInfo, Manifest

ATTENTION, LOWER = "attention", "lower:"
KEEP_DTYPES = ("int8", "bf16")
"""How kept weights are held: as the provider has them, or as the checkpoint has them."""
_LOWER = re.compile(rf"{LOWER}(\d{{1,5}})", re.ASCII)
_BLOCK = re.compile(r"\.(\d{1,9})\.", re.ASCII)
_IN_ATTENTION = re.compile(r"(^|\.)[^.]*(attn|attention)[^.]*\.", re.IGNORECASE | re.ASCII)
"""Matches the name of a layer inside a module such as self_attn, attn, attention or self_attention."""
_PATTERN = re.compile(r"[A-Za-z0-9_.\-+ *?]+|.*\[.*")
"""Matches what can be a pattern of layers' names, all that a manifest may have (`wire.manifest`): `lowr:3` cannot."""
_MOST_CHARACTERS, _MOST_SPOKEN = 60, 200
_FORMS = "'attention', 'lower:N' for the N lowest blocks, or names of layers with * and ?"


@dataclass(frozen=True)
class Kept:
    """Says which layer groups the tenant computes itself.

    Attributes:
        groups: their numbers in the manifest.
        shared: layers that `attention` or `lower:N` names, but that stay with the provider because they share a call
            with layers that these do not name.
    """

    groups: frozenset[int] = frozenset()
    shared: tuple[str, ...] = ()

    def not_kept(self) -> str:
        """Returns the text on the layers that are not kept although they were named."""
        others = f" and {len(self.shared) - 1} more" if len(self.shared) > 1 else ""
        return f"{self.shared[0]}{others}, which share a call with other layers"

    def asked(self, manifest: Manifest) -> Manifest:
        """Returns a manifest with those groups only whose rows are sent."""
        if not self.groups:
            return manifest
        groups = tuple(each for each in manifest.groups if each.id not in self.groups)
        return manifest.model_copy(update={"groups": groups})


def read_keep(keep: str | Sequence[str] | None, can_be_had: bool) -> tuple[str, ...]:
    """Returns the items of the option `keep`, which a text separates by commas.

    Args:
        keep: `attention`, `lower:N` or patterns of layer names, as a text or a list; None for no layers.
        can_be_had: whether the weights can be had at all: from a checkpoint of the tenant's own, or from a provider
            that may give them away.

    Raises:
        ConfigurationError: the option is no text or list of texts, an item is impossible, or the weights cannot be had.
    """
    if keep is None:
        return ()
    given = [keep] if isinstance(keep, str) else keep
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigurationError(f"keep is {_FORMS}, as a text or a list, got a value of type {type(keep).__name__}")
    items = tuple(dict.fromkeys(item.strip() for each in given for item in each.split(",")))
    for item in items:
        is_lower = item.startswith(LOWER)
        number = _LOWER.fullmatch(item)
        is_possible = number is not None and int(number[1]) > 0 if is_lower else _PATTERN.fullmatch(item) is not None
        if not is_possible:
            raise ConfigurationError(f"keep (--keep) is {_FORMS}, got {item[:_MOST_CHARACTERS]!a}")
    if items and not can_be_had:
        raise ConfigurationError(
            "keep= (--keep) computes layers here: name your own checkpoint with verify= (--verify), or fetch the "
            "weights by a grpcs:// URL; an ipc: URL carries none"
        )
    return items


def check_keep_dtype(keep_dtype: str, items: Sequence[str], is_verified: bool) -> str:
    """Returns the option `keep_dtype`, one of `KEEP_DTYPES`.

    Args:
        keep_dtype: the option.
        items: what `read_keep` returned.
        is_verified: whether the tenant names a checkpoint of its own.

    Raises:
        ConfigurationError: it is another one, has no effect, or needs a checkpoint of the tenant's own.
    """
    if keep_dtype not in KEEP_DTYPES:
        meant = nearest(keep_dtype, KEEP_DTYPES) if isinstance(keep_dtype, str) else None
        advice = "" if meant is None else f": did you mean {meant}?"
        raise ConfigurationError(
            f"keep_dtype (--keep-dtype) is one of {', '.join(KEEP_DTYPES)}, got {ascii(keep_dtype)[:40]}{advice}"
        )
    if keep_dtype != KEEP_DTYPES[0] and not items:
        raise ConfigurationError("keep_dtype (--keep-dtype) has no effect without keep= (--keep)")
    if keep_dtype != KEEP_DTYPES[0] and not is_verified:
        raise ConfigurationError(
            "keep_dtype='bf16' (--keep-dtype) takes your checkpoint's own weights: name it with verify= (--verify); a "
            "provider gives int8 only"
        )
    return keep_dtype


def spoken_keep(items: Sequence[str]) -> str:
    """Returns the items of `keep` as one text for a plan, which is short also for many items, and another for
    others."""
    whole = ", ".join(items)
    if len(whole) <= _MOST_SPOKEN:
        return whole
    return f"{whole[:_MOST_SPOKEN]}... (SHA-256 {hashlib.sha256(whole.encode()).hexdigest()[:16]})"


def block_of(layer: str) -> int | None:
    """Returns the number of the transformer block of a layer, by the layer's name; None outside of blocks."""
    found = _BLOCK.search(f".{layer}.")
    return None if found is None else int(found[1])


def choose_kept(items: Iterable[str], manifest: Manifest) -> Kept:
    """Returns which groups of a provider the tenant computes itself.

    Args:
        items: what `read_keep` returned.
        manifest: the provider's manifest.

    Raises:
        ConfigurationError: an item names no layer of the model, or only a part of the layers that share a call; or
            nothing would be left to the provider.
    """
    layers = [layer for group in manifest.groups for layer in group.layers]
    named: set[str] = set()
    by_pattern: set[str] = set()
    for item in items:
        found = set(_named_by(item, layers))
        named |= found
        if item != ATTENTION and not item.startswith(LOWER):
            by_pattern |= found
    groups, shared = set(), []
    for group in manifest.groups:
        own = [layer.name for layer in group.layers]
        chosen = [name for name in own if name in named]
        if len(chosen) == len(own):
            groups.add(group.id)
            continue
        for name in chosen:
            if name in by_pattern:
                others = ", ".join(_last(each) for each in own if each not in named)
                raise ConfigurationError(
                    f"keep (--keep) names {name} without what shares its call, {others}: name all of them, or none"
                )
            shared.append(name)
    return _checked(Kept(frozenset(groups), tuple(shared)), len(manifest.groups))


def _checked(kept: Kept, num_groups: int) -> Kept:
    if len(kept.groups) == num_groups:
        raise ConfigurationError(
            "keep (--keep) names every layer of this model, so nothing would be left to the provider: run it locally"
        )
    if kept.shared and not kept.groups:
        raise ConfigurationError(
            f"keep (--keep) names no call of this model: {kept.shared[0]} shares one with other layers. Name all of "
            "them by patterns"
        )
    return kept


def _named_by(item: str, layers: Sequence[LayerInfo]) -> Iterator[str]:
    """Yields the names of the layers that an item names, at least one.

    Raises:
        ConfigurationError: there is none.
    """
    names = [layer.name for layer in layers]
    if item == ATTENTION:
        found = [name for name in names if _IN_ATTENTION.search(name)]
        if not found:
            raise ConfigurationError("keep='attention': this provider serves no layers inside an attention module")
    elif number := _LOWER.fullmatch(item):
        numbers = {block for name in names if (block := block_of(name)) is not None}
        if int(number[1]) > (most := max(numbers, default=-1) + 1):
            raise ConfigurationError(f"keep={item!a}: this model has {most} blocks")
        found = [name for name in names if (block := block_of(name)) is not None and block < int(number[1])]
    else:
        found = [name for name in names if fnmatch.fnmatchcase(name, item) or fnmatch.fnmatchcase(name, f"*.{item}")]
        if not found:
            known = [*dict.fromkeys(_last(name) for name in names), ATTENTION, *names]
            meant = nearest(item[:_MOST_CHARACTERS], known)
            advice = f"one is called {names[0]}" if meant is None else f"the nearest is {meant}"
            raise ConfigurationError(
                f"keep (--keep) names {item[:_MOST_CHARACTERS]!a}, but no layer of this model is called so: {advice}"
            )
    yield from found


def _last(name: str) -> str:
    return name.rpartition(".")[2]
