"""Ports, streams and requests: which callers are admitted, which requests are refused, and how frames come in and go
out."""
