"""This package computes the products of layer groups in other processes of this machine, which share memory with the
provider's process. It also sends each request to the shard that holds the request's layer group, on this machine or on
another."""
