"""This package holds the masks. Each mask decides what is sent instead of an activation and how the reply is unmasked.
The package imports only wire."""
