"""Serves many requests, each with its own adapter, over base layers that a provider holds."""
