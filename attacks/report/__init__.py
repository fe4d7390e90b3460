"""This package turns findings into a report: catalogue of adversaries, command line, table, verdict on a build."""
