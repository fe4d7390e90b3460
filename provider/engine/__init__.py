"""This package takes requests from the queue, computes their products in batches, and hands back the replies."""
