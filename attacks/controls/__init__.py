"""This package holds positive controls: each adversary must win on traffic with a known weakness.

The code of the adversary is the same as against a mask.
A control makes its own traffic, so it knows the truth; the adversary that it runs sees only the view. Every report and
the tests run the controls: a control that stops winning fails the build.
"""
