"""Reserves blocks in a ledger as a mask does, for tests of several processes and threads."""

from __future__ import annotations

from noise.ledger.ledger import Ledger, SeedExhausted


def reserve_through_renewals(ledger: Ledger, num_calls: int, budget: int) -> list[tuple[str, int]]:
    """Reserves blocks, and renews the seed whenever its budget is used up. Returns (seed, block number) of every
    block."""
    seed, blocks = ledger.current_seed("toy", budget), []
    while len(blocks) < num_calls:
        try:
            blocks.append((seed.seed_id, ledger.reserve(seed.seed_id, 1, "worker").first_block))
        except SeedExhausted:
            seed = ledger.renew(seed.seed_id)
    return blocks
