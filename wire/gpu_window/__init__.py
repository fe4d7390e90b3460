"""This package lets two processes on one host share an allocation of a GPU, a window: a provider makes it and hands it
to a tenant, which writes masked rows there and reads replies. So neither crosses a socket (wire/SPEC.md, section 3)."""
