"""Finds what an object keeps in memory, wherever inside it lies: secrets that were dropped are not there."""

from __future__ import annotations

import gc
import types
from typing import TypeVar

Kind = TypeVar("Kind")
_EVERYBODYS = (type, types.ModuleType, types.CodeType, types.FrameType)
"""What belongs to the whole program: from there everything could be reached."""


def reachable(root: object, kind: type[Kind]) -> list[Kind]:
    """Returns each object of that type, or of a type derived from it, that lives as long as `root` does."""
    return [each for each in _kept_by(root) if isinstance(each, kind)]


def _kept_by(root: object) -> list[object]:
    found, waiting, seen = [], [root], {id(root)}
    while waiting:
        found.append(waiting.pop())
        for each in _parts(found[-1]):
            if id(each) not in seen and not isinstance(each, _EVERYBODYS):
                seen.add(id(each))
                waiting.append(each)
    return found


def _parts(whole: object) -> list[object]:
    """Returns what an object refers to; of a function what it was made with, not the globals of its module."""
    if isinstance(whole, types.FunctionType):
        return [whole.__closure__, whole.__defaults__, whole.__kwdefaults__]
    return gc.get_referents(whole)
