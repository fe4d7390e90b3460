"""This package runs one provider in several processes, the ranks, which compute each product together.

Weights are split by tensor parallelism or, for comparison, by PyTorch's FSDP2. Rank 0 has the server, the scheduler and
the executor. The other ranks only compute what rank 0 requests. Traffic between ranks is neither encrypted nor
authenticated (docs/placement.md, "Security").
"""
