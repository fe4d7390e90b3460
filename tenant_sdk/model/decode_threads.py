"""Runs a decode step's own layers on one core: one token's norms, rotations and attention are too small to share.

Between two of these layers the tenant waits for a remote layer, and meanwhile the other threads of torch's pool fall
asleep. Each small operation that is shared then waits until the system has woken them: 50 to 300 µs on a virtual
machine, and on a machine that the provider shares it competes for a core on which the provider polls for requests. This
was a tenth of the time of a SmolLM2 token (docs/benchmarks_history.md, "Decode"). The head is not in the decoder, and
uses all cores.

Guarantees: a step's numbers are the same up to the order of sums. The calling thread gets its cores back after every
step, also after one that failed; after a step that Ctrl-C interrupted it gets them back when the next step begins.
Training, long prompts, long contexts and other devices are left alone. Masks that have to be made in the middle of a
step, and products of a provider in this process, use all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wire.ring.threads import return_cores, spare_cores

MOST_TOKENS = 16
"""The largest number of tokens, over all sequences of the batch, that a call may have to count as a decode step."""
MOST_CACHED = 1 << 18
"""The largest number of values in one layer's cached keys for which attention stays on one core: about a megabyte,
which one core reads in about 0.1 ms. Attention over more keys is worth sharing."""


def watch(decoder: nn.Module) -> None:
    """Watches a model's decoder, which is the model without its head; each of its decode steps uses one core."""
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end, always_call=True)


def _begin(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    return_cores()  # a step that was interrupted did not call its end hook
    if _is_small(decoder, args, options):
        spare_cores()


def _end(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    return_cores()


def _is_small(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether this is a decode step with a short context on the CPU; False where that cannot be told."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    tokens = args[0] if args else options.get("input_ids")
    if tokens is None:
        tokens = options.get("inputs_embeds")
    if not isinstance(tokens, torch.Tensor) or not tokens.is_cpu or tokens.dim() < 2:
        return False
    batch, length = tokens.shape[:2]
    cached: Any = options.get("past_key_values")
    if not hasattr(cached, "get_seq_length") or batch * length > MOST_TOKENS:
        return False
    try:
        width, seen = int(decoder.config.hidden_size), int(cached.get_seq_length())  # type: ignore[union-attr, arg-type]
    except Exception:  # noqa: BLE001 - the config or the cache is of another kind
        return False
    return batch * (seen + length) * width <= MOST_CACHED
