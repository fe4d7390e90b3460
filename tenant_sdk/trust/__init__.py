"""What a tenant accepts from a provider: bundle, comparison with a trusted checkpoint, pins, rules for a config."""
