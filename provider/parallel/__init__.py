"""One provider in several processes that compute each product together: tensor parallel, and FSDP2 to compare.

Rank 0 has the server, the scheduler and the executor; the other ranks only compute what it tells them to. What passes
between them is neither encrypted nor authenticated (docs/placement.md, "Security").
"""
