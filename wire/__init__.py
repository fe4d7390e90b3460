"""This package defines what crosses the boundary between a tenant and a provider: frames, limits, arithmetic and
errors. It imports no sibling package."""
