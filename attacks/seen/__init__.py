"""What a provider sees, read back from a recording, and what it knows: the public model and the order of calls."""
