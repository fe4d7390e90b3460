"""This package holds positive controls: each adversary must win on traffic that it should win on, by the same code.

A control makes its own traffic, so it knows the truth; the adversary that it runs sees only the view. Every report and
the tests run the controls: a control that stops winning fails the build.
"""
