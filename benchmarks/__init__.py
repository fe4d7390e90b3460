"""Runs against peers, side by side; `python -m benchmarks` prints the tables of docs/benchmarks.md."""
