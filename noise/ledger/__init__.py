"""This package records the public seeds and the blocks that were reserved under them."""
