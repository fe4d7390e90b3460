"""This package checks a provider's bundle: digests, config, agreement with a trusted checkpoint, and pins of first
use."""
