"""This package holds positive controls: each adversary must win on traffic with a known weakness.

The code of an adversary is the same in its control as in an attack on a mask. A control makes its own traffic, so the
control knows the secrets; the adversary sees only the view (what a provider sees). Every report and the tests run the
controls. A control that stops winning fails the build.
"""
