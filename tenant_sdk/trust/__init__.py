"""This package checks a provider's bundle (config, tokenizer and small tensors): its digests, its config, its agreement
with a trusted checkpoint, and its agreement with earlier sessions."""
