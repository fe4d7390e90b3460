"""A transformers model whose base layers are at the provider, and the calls that it makes."""
