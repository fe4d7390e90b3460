"""This package computes attention over the keys and values of many requests."""
