"""This package checks what a provider offers: the bundle, its agreement with a trusted checkpoint, pins, the config."""
