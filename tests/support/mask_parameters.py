"""Holds the parameters of the lattice mask that tests use, the default ones and toy ones, and options of a client
without a mask."""

from __future__ import annotations

from typing import Any

from noise.params import PARAMETERS, LatticeParameters

DEFAULT = PARAMETERS["default"]
"""The parameters that a client uses if the user names none."""
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
"""Parameters that are small enough for slow reference products. A client accepts them only with `allow_toy`."""
TOY_OPTIONS = {"parameters": TOY, "allow_toy": True}
"""Mask options of a client that uses the toy parameters."""
TOY_MASK = {**TOY_OPTIONS, "hints": "stream", "background": False}
"""The same, with hints in memory only, and masks made by the thread that needs them."""
PLAIN: dict[str, Any] = {"mask": "off", "arithmetic": "float", "weights": "native", "verify": False}
"""Options of a `ScriptedProvider`'s client whose results equal local ones up to rounding. It fetches no hints."""
