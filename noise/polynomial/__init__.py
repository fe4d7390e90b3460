"""This package computes products in Z_q[X]/(X^N + 1) by Fourier transforms, with torch or with compiled code."""
