"""Holds the parameters of the lattice mask that tests use: the default ones, and toy ones."""

from __future__ import annotations

from noise.params import PARAMETERS, LatticeParameters

DEFAULT = PARAMETERS["default"]
"""The parameters that a client uses if the user names none."""
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
"""Parameters that are small enough for slow reference products. A client accepts them only with `allow_toy`."""
TOY_OPTIONS = {"parameters": TOY, "allow_toy": True}
"""Mask options of a client that uses the toy parameters."""
