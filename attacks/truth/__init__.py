"""Knowledge that only the judge may have: the victim's secrets, and whether claims about them are right."""
