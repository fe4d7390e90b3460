"""Runs the `provider` command as `python -m provider`."""

from provider.cli import main

if __name__ == "__main__":
    main()
