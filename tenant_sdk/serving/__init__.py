"""This package serves many requests at once over one provider, with an engine, a scheduler, a KV cache and adapters."""
