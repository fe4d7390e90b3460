"""This package shows a running provider to its operator: usage, metrics, health, logs and recordings.

Only a recording, which the operator must turn on, holds values of tensors.
"""
