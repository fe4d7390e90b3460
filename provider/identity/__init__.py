"""The provider's certificate authority, and the registry of the tenants and shards that it enrolled."""
