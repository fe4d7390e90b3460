"""The tenant that is attacked, its model and traffic, and a test of its random draws from inside its process."""
