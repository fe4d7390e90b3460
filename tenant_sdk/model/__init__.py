"""This package builds a transformers model whose base layers are at the provider, and makes the model's calls."""
