"""The tenant that is attacked, its model and traffic, and a look at its draws from inside."""
