"""This package connects a tenant and a provider of one host by a socket in a folder. TLS proves who is there, and then
frames go unencrypted (wire/SPEC.md, section 1)."""
