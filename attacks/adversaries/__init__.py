"""This package holds the adversaries, one per file, and modules that several adversaries share. None of its modules may
import the tenant's code, a mask's code or the truth about the victim."""
