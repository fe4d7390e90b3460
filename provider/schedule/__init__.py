"""Decides what runs next at the executor: pure code with the caller's clock; no thread, no tensor, no device."""
