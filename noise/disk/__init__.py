"""How files that count are written: durably, under a lock, for their owner alone."""
