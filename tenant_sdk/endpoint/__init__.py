"""This package serves an engine over HTTP with OpenAI's interface, on the tenant's own machine."""
