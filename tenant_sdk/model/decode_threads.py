"""A decode step's own layers on one core: norms, rotations and the attention of a token are too small to share.

Between two of them a remote layer is waited for, and in that time the other threads of torch's team fall asleep: each
small operation that is shared then waits for the system to wake them, 50 to 300 µs on a virtual machine, and on a
machine that the provider shares, for a core that it is looking for requests on. Of a token of SmolLM2 that was a tenth
(docs/benchmarks_history.md). The head is not in the decoder, and keeps all cores.

Guarantees: a step's numbers are the same up to the order of sums; the calling thread's cores are its own again after
every step, also after one that failed, and after one that Ctrl-C ended when the next begins; training, long prompts,
long contexts and other devices are left alone. Masks that have to be made in the middle of a step, and products of a
provider in this process, have all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wire.ring.threads import return_cores, spare_cores

MOST_TOKENS = 16
"""Of a step, over all of its rows."""
MOST_CACHED = 1 << 18
"""Numbers that the keys of one layer may have, from which on their attention is worth sharing: a megabyte, which takes
one core 0.1 ms or so to read."""


def watch(decoder: nn.Module) -> None:
    """Watches a model's decoder, the part without its head; each of its decode steps uses one core."""
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end, always_call=True)


def _begin(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    return_cores()  # of a step that was interrupted: hooks are not called then
    if _is_small(decoder, args, options):
        spare_cores()


def _end(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    return_cores()


def _is_small(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether this is a decode step of a short context on the CPU, as far as that can be seen; else False."""
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
    except Exception:  # noqa: BLE001 - another kind of config, or of cache
        return False
    return batch * (seen + length) * width <= MOST_CACHED
