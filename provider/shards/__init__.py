"""This package computes the products of layer groups in other processes. Each process is on this machine and uses
shared memory, or is on another host and connects to the provider's port."""
