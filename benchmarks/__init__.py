"""This package measures Veilbase beside other ways to do the same work, in the same run. `python -m benchmarks` runs
most of the benchmarks and prints their tables."""
