"""This package decides which rows the executor computes next.

It is pure code: callers pass the time in, and it uses neither threads nor tensors nor devices.
"""
