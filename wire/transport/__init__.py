"""This package carries a tenant's requests to a provider: by gRPC, by TLS sockets, by a Unix socket of one host, or
inside one process."""
