"""This package holds the tenant that is attacked, its model and traffic, and tests of the random numbers in its
masks."""
