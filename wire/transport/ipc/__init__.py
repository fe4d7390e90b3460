"""This package connects a tenant to a provider on the same host, through a Unix socket in a folder. TLS first proves
who is at each end; after that, frames are sent unencrypted (wire/SPEC.md, section 1)."""
