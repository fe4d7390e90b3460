"""This module lets `python -m tenant_sdk` run the command `tenant`."""

from tenant_sdk.cli import main

if __name__ == "__main__":
    main()
