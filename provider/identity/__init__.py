"""The provider's certificate authority, and the registry of whom it let in."""
