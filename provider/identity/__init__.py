"""This package holds the provider's certificate authority, and the registry of enrolled tenants."""
