"""This package computes the products of layer groups on the hosts of a Ray cluster (extra `veilbase[ray]`)."""
