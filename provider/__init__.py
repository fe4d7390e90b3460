"""This package is the untrusted side: it runs the base layers of a frozen model for enrolled tenants.

It imports `wire` and no other package of this repository.
"""
