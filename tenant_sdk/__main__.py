"""This module lets `python -m tenant_sdk` run the command `tenant`."""

from runtime.stopping import at_once

with at_once("tenant"):
    from tenant_sdk.cli import main

if __name__ == "__main__":
    main()
