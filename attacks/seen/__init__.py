"""Reads what a provider sees from a recording, and describes what it knows: the public model and the order of calls."""
