"""Serves many requests at once over one provider: it holds the engine, scheduler, KV cache and adapters."""
