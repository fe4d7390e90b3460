"""This package measures Veilbase beside other ways to do the same work, in the same run. `python -m benchmarks` runs
most of the benchmarks and prints their tables.

Each line that a benchmark prints is there at once, also in a pipe, where Python would keep them to the end."""

import io
import sys

if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)
