"""Serves many requests at once over one provider: the engine, its scheduler, its KV cache and what goes with them."""
