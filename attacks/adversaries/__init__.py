"""This package holds the adversaries, one per file. None of its modules may import a tenant, a mask or the truth."""
