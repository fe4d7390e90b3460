"""This package holds what both ends need and is not on the wire: the lock around loading models, threads and cores,
compiled code, and what commands have in common. It imports no sibling package."""
