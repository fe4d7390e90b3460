"""Holds the adversaries, one family per file, and the mathematics that several of them share.

No module here may import the tenant's code, a mask's code or the truth about the victim. Some modules claim nothing
themselves: `attention`, `mlp`, `residual`, `ring_scales` and `ring_lwe` solve for one part of a model, or of a lattice
mask, on behalf of others.
"""
