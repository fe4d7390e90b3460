"""What a tenant accepts from a provider: the bundle, its comparison with a trusted checkpoint, pins, rules for a
config."""
