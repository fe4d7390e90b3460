"""This package fetches or computes the hints of the lattice mask, and keeps them on disk, so that each is made once for
a layer group and direction. Without a folder it keeps them in memory only. A hint is the product of the public matrix
and a weight."""
