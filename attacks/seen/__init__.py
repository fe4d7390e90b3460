"""This package reads a recording as a provider sees it, and describes what a provider knows of the model and calls."""
