"""Finds all objects that an object keeps in memory, at any depth. Tests use it to show that secrets were dropped."""

from __future__ import annotations

import gc
import types
from typing import TypeVar

Kind = TypeVar("Kind")
_EVERYBODYS = (type, types.ModuleType, types.CodeType, types.FrameType)
"""Types of objects that belong to the whole program. The search skips these objects, since every object can be reached
from them."""


def reachable(root: object, kind: type[Kind]) -> list[Kind]:
    """Returns all objects of the given type, or of a derived type, that live at least as long as `root`."""
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
    """Returns the objects to which an object refers. For a function, the globals of its module are left out."""
    if isinstance(whole, types.FunctionType):
        return [whole.__closure__, whole.__defaults__, whole.__kwdefaults__]
    return gc.get_referents(whole)
