"""This package holds attacks that are not in the catalogue: providers that lie, weakened masks, and the distinguisher
game."""
