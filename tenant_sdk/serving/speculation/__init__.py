"""This package implements speculative decoding. It drafts (guesses) tokens at the tenant, so that one pass through the
remote model may give several tokens."""
