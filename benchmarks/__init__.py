"""This package measures Veilbase against peers in the same run; `python -m benchmarks` prints all tables."""
