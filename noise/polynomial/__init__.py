"""This package computes products in Z_q[X]/(X^N + 1) by transforms, in torch and in a compiled form."""
