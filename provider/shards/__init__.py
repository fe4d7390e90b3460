"""Layer groups in processes of their own: here, with shared memory, or on other hosts, over the provider's own port."""
