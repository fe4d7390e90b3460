"""How files that must not be lost or read by others are written: durably, under a lock, for their owner alone."""
