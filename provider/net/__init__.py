"""Ports, streams and requests: who may ask, what is refused, and the way of frames in and out."""
