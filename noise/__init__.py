"""This package holds the masks: each decides what is sent instead of an activation and how the reply is unmasked. It
imports only wire."""
