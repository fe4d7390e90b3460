"""This package takes requests from the queue, computes the requests' products in batches, and returns the replies."""
