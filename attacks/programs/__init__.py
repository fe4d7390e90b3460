"""Programs beside the catalogue: providers that lie, masks that are weakened, the distinguisher game."""
