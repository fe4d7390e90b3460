"""Runs the `provider` command as `python -m provider`."""

from runtime.stopping import at_once

with at_once("provider"):
    from provider.cli import main

if __name__ == "__main__":
    main()
