"""This package carries a tenant's requests to a provider: by gRPC or TLS sockets, both with mutual TLS, or inside one
process."""
