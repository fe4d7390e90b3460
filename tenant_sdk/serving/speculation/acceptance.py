"""This module decides how many drafted tokens a request keeps after a pass.

A pass computes the rows of the last known token and of the drafted tokens. The row of a token gives the logits of the
token after it. So the first row's logits are right in any case, and the logits of a drafted token's row are right if
all drafted tokens up to this one are the tokens that the request chooses.

The request chooses its tokens one after the other, from these logits, just as it does without speculation: with the
same logits processors, each called once for a token, and with the same random numbers. A drafted token is accepted if
it is the token that was chosen in its place. The first token that was chosen otherwise is kept as well, and the rows
after it are of no use.

Guarantees: the tokens are those of a request without speculation, greedy or with its seed, up to rounding. So drawn
tokens have the request's own distribution, whatever is drafted.

Rejection sampling (Leviathan et al., 2023, "Fast inference from transformers via speculative decoding", section 2.3)
accepts a drafted token at random and otherwise draws another one from the rest of the distribution. It keeps the
distribution, but not the tokens of a seed, so it is not used. Here a draft model draws with the random numbers with
which the request will draw (`Sampler.fork`), so that both often draw the same. If d is the total variation distance of
their distributions, they do so at least with probability (1 - d) / (1 + d) (Daliri, Musco and Suresh, 2024, "Coupling
without communication and drafter-invariant speculative decoding"). Rejection sampling accepts with probability 1 - d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def take_accepted(drafted: Sequence[int], logits: torch.Tensor, take: Callable[[torch.Tensor], int | None]) -> int:
    """Lets a request choose its next tokens, one for each drafted token and one more. The request stops after the first
    token that differs from the drafted one or ends the answer.

    Args:
        drafted: the drafted tokens.
        logits: the logits after the last known token and after each drafted token, shape (1 + num_drafted, vocab_size).
        take: chooses the next token from logits of shape (vocab_size,) and adds it to the answer; returns its id, or
            None if the answer is over.

    Returns:
        The number of tokens that were chosen.
    """
    num_taken = 0
    for row, guess in zip(logits, (*drafted, None), strict=True):
        token_id, num_taken = take(row), num_taken + 1
        if token_id is None or token_id != guess:
            break
    return num_taken
