"""Products in Z_q[X]/(X^N + 1), by transforms, and their compiled form."""
