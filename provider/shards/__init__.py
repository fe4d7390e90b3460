"""This package computes the products of layer groups in other processes of this machine, which share memory with the
provider's; and it sends each request to the shard that holds its layer group, wherever that is."""
