"""This package fetches the hints of the lattice mask, once for each layer group and direction, and keeps them on disk.
A hint is the product of the public matrix and a weight."""
