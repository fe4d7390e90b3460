"""This package holds what a provider sees: its recording of calls, and what it knows about the public model."""
