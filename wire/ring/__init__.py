"""Arithmetic mod 2^32 that both ends must agree on to the last bit, and memory and threads for it."""
