"""Runs the benchmark: `python -m benchmarks.accelerator`."""

from benchmarks.accelerator import main

if __name__ == "__main__":
    main()
