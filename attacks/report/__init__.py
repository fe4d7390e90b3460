"""This package runs the catalogue of adversaries and writes the report: command line, table, and verdict on a build."""
