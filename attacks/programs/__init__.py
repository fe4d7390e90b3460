"""This package holds programs beside the catalogue: providers that lie, weakened masks, the distinguisher game."""
