"""Parameters of the lattice mask that tests use: those of a client, and a toy's."""

from __future__ import annotations

from noise.params import PARAMETERS, LatticeParameters

DEFAULT = PARAMETERS["default"]
"""The parameters that a client uses where it names none."""
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
"""Parameters small enough to multiply by hand; no client takes them unless it says so."""
TOY_OPTIONS = {"parameters": TOY, "allow_toy": True}
"""Options of a client that masks with the toy."""
