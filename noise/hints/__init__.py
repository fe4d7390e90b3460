"""Hints of the lattice mask: fetched once for each layer group and direction, and kept on disk."""
