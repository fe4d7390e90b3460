"""Mask schemes: what is sent instead of an activation, and how the reply is put right. Imports wire only."""
