"""What an operator sees of a running provider: counts, metrics, health, logs; never a tensor's value."""
