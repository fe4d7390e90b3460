"""What a tenant believes of a provider: the bundle, its comparison with a trusted checkpoint, pins, rules for a
config."""
