"""Ways for a tenant's requests to reach a provider: gRPC and TLS sockets, both with mTLS, or the same process."""
