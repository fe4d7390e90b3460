"""This package runs layer groups in other processes: on this machine with shared memory, or on other hosts, which
connect to the provider's port."""
