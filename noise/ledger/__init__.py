"""The record of public seeds and of the blocks that were reserved under them."""
