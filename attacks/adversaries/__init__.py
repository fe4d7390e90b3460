"""This package holds the adversaries, one per file. None of its modules may import the tenant's code, a mask's code or
the truth about the victim."""
