"""Turns findings into a table: the catalogue of adversaries, the command line, the verdict on a build."""
