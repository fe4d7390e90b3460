"""Ways for a tenant's requests to reach a provider: gRPC over mTLS, or the same process."""
