"""What crosses the boundary between a tenant and a provider: frames, limits, arithmetic, errors. Imports no sibling."""
