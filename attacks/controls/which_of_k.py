"""Runs `which-of-K` on messages whose rows are a norm layer's output, under the mask `gaussian-pool`."""

from __future__ import annotations

import tempfile

from attacks.adversaries.which_of_k import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import decode_steps, inputs_of, normed_groups, pool_traffic, row_errors


def control() -> ControlResult:
    """Computes the largest relative error of a message's unmasked rows, over 32 messages. Each message is masked with
    one of its group's 8 noise vectors, which are drawn afresh after 6 messages."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = pool_traffic("llama", folder, 1.0, decode_steps(inputs_of("llama", 2, 12), 3))
        errors = row_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
        groups = normed_groups(traffic.public)
        wanted = [message.seq for message in traffic.view.select("product") if message.group in groups]
    return ControlResult(
        ADVERSARY.name, "gaussian-pool, K = 8, no correlation used", "worst relative error of a message's rows",
        max(errors.get(seq, 1.0) for seq in wanted), 1e-4, smaller_wins=True,
    )  # fmt: skip
