"""This package drafts tokens at the tenant, so that one pass through the remote model may give several tokens."""
