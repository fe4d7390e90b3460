"""This package holds the tenant that is attacked, its model and traffic, and a test of its draws from inside it."""
