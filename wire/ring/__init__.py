"""This package computes mod 2^32, with results that are the same at both ends to the last bit. It also manages the
memory and threads that the computation needs."""
