"""This package holds what only the judge may know: the victim's secrets, and whether claims about them are right."""
