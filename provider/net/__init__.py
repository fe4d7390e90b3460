"""This package holds the ports and streams: it admits callers, checks requests, and receives and sends frames."""
