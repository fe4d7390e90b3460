"""`python -m tenant_sdk` is `tenant`."""

from tenant_sdk.cli import main

if __name__ == "__main__":
    main()
