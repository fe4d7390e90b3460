"""This package holds what only the judge may know, the victim's secrets, and decides whether claims about them are
right."""
