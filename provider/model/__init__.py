"""This package loads a model, groups and quantises the layers to serve, and builds the bundle for tenants."""
