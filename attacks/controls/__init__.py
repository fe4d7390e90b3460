"""This package holds positive controls, which are traffic with a known weakness on which an adversary must win.

A control runs the same code of the adversary as an attack on a mask does. The control makes its own traffic and so
knows the secrets, but the adversary sees only the view (what a provider sees). Each run of `attacks.extract_lora` runs
the controls of its adversaries, and the tests run all controls. Both fail if an adversary no longer wins on its
control.
"""
