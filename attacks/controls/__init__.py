"""Positive controls: each adversary must win on traffic where it should, by the same code that meets a mask.

A control makes its own traffic, so it knows the truth; the adversary that it runs sees only the view. `run_all` is
called by every report and by the tests: a control that stops winning fails the build.
"""
