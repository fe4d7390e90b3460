"""What crosses the boundary between a tenant and a provider: frames, limits, arithmetic, errors. It imports no
sibling."""
