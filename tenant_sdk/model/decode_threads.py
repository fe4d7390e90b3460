"""This module runs the tenant's layers of a decode step (one new token for each sequence) on one core, since the
operations of one token are too small for several cores.

Between two of these layers the tenant waits for a remote layer, and meanwhile the other threads of torch's pool fall
asleep. A small operation that uses several threads waits until the system has woken these threads, for 50 to 300 µs on
a virtual machine. If the provider runs on the same machine, the woken threads also compete for the core on which the
provider polls for requests. Together this took a tenth of the time of a SmolLM2 token (docs/benchmarks_history.md,
"Decode"). The head, which is not in the decoder, uses all cores.

Guarantees: a step's numbers are the same up to the order of sums. The calling thread may use all cores again after
every step, also after a step that failed. If Ctrl-C interrupted a step, the thread may use all cores again when the
next step starts. Training, long prompts, long contexts and other devices are not affected. Masks that have to be made
in the middle of a step, and products of a provider in this process, use all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wire.ring.threads import return_cores, spare_cores

MOST_TOKENS = 16
"""The largest number of tokens in a decode step, over all sequences of the batch; a longer call uses all cores."""
MOST_CACHED = 1 << 18
"""The largest number of values in one layer's cached keys for which attention runs on one core, counted as if each key
had the model's hidden size: 1 MiB in float32, which one core reads in about 0.1 ms. With more keys, several cores are
faster."""


def watch(decoder: nn.Module) -> None:
    """Adds hooks to a decoder, which is a model without its head, so that every decode step of the decoder uses one
    core."""
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end, always_call=True)


def _begin(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    return_cores()  # a step that was interrupted did not call its end hook
    if _is_small(decoder, args, options):
        spare_cores()


def _end(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    return_cores()


def _is_small(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Returns whether this is a decode step with a short context on the CPU. Returns False if gradients are recorded,
    if torch is compiling the model, or if the arguments do not show the step's size."""
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
