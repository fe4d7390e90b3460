"""This module loads a library that was compiled when the package was built (setup.py), and declares its functions.

Guarantees: a library is used only if it is there, has the expected version, has every declared function, and says that
the processor has what its code needs. Nothing is loaded if the environment variable VEILBASE_KERNELS is `none`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POINTER: Any = ctypes.c_void_p
"""The type of an address in a declaration."""
COUNT: Any = ctypes.c_int64
"""The type, in a declaration, of a number of items or of a stride."""
INT: Any = ctypes.c_int
Signature = tuple[Sequence[Any], Any]
"""The types of a function's arguments, and the type of its result, which is None if the function returns nothing."""


VARIABLE = "VEILBASE_KERNELS"
_VALUES = ("none", "avx2")


def unknown_kernels() -> str:
    """Returns the error text for a value of the environment variable that is none of those that there are; an empty
    text if it is one, or is not set."""
    given = os.environ.get(VARIABLE, "")
    if given in ("", *_VALUES):
        return ""
    return f"the environment variable {VARIABLE} is {' or '.join(_VALUES)}, or left out, got {ascii(given)[:40]}"


def load(file: Path, version: tuple[str, int], usable: str, functions: Mapping[str, Signature]) -> ctypes.CDLL | None:
    """Loads a library and declares the signatures of its functions.

    Args:
        file: the library.
        version: the name of the function that returns the version of the functions' signatures, and the version that
            the caller knows.
        usable: the name of the function that tells whether the processor has what the code needs.
        functions: the signatures of the functions to declare, by name.

    Returns:
        The library; None if VEILBASE_KERNELS is `none`, if the file cannot be loaded, has another version or lacks a
        function, or if the processor lacks what the code needs.
    """
    if os.environ.get(VARIABLE, "") == "none":
        return None
    try:
        library = ctypes.CDLL(str(file))
        if getattr(library, version[0])() != version[1]:
            return None
        for name, (arguments, result) in functions.items():
            declared = getattr(library, name)
            declared.argtypes, declared.restype = list(arguments), result
        return library if getattr(library, usable)() else None
    except (OSError, AttributeError):
        return None
