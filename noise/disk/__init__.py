"""This package writes files that must not be lost or read by others: durably, under a lock, for their owner alone."""
