"""This package writes files that survive a crash and that only their owner can read, and locks files."""
