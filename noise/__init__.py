"""Mask schemes: what is sent instead of an activation, and how the reply is unmasked. This package imports wire
only."""
