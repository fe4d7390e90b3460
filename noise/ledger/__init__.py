"""This package records the public seeds of masks and the blocks of mask rows that were reserved under each seed."""
