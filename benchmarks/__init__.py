"""Side-by-side runs against peers; `python -m benchmarks` prints the tables of docs/benchmarks.md."""
