"""This package fetches the hints of the lattice mask, once for each layer group and direction, and keeps them on
disk."""
