"""This module writes the text that `Engine.explain` prints: how many requests fit, and what the provider sees."""

from __future__ import annotations

from tenant_sdk.serving.kv import KvLayout
from tenant_sdk.serving.scheduler import Budget

_LENGTHS = (1024, 8192)
"""The request lengths, in tokens, for which the text says how many requests fit."""
_VISIBLE = (
    "the rows of every step, summed over all requests: prompts that join, as far as lengths and numbers show in the "
    "sums, and answers that end; not which row is whose, nor which adapter"
)
_TIMES = "show, and with them the tenant's own work between calls, which takes longer with some kinds of adapters"
_ENDS = (
    "show, unless fixed_length=True: then the rows go on to the length limit, and only the limit and the time of the "
    "request show"
)


def explain(layout: KvLayout, budget: Budget, context_length: int) -> str:
    """Returns the text, one line for each topic.

    Args:
        layout: how keys and values are kept.
        budget: the scheduler's limits.
        context_length: the most tokens of a request.
    """
    lengths = sorted({min(length, context_length) for length in _LENGTHS})
    fitting = ", ".join(
        f"{min(budget.kv_bytes // layout.bytes_for(length), budget.max_running)} of {length} tokens"
        for length in lengths
    )
    kept = f"{budget.kv_bytes / 1e6:.0f} MB of KV ({str(layout.dtype).removeprefix('torch.')})"
    lines = {
        "requests at a time": f"{budget.max_running} at most; in {kept} {fitting}",
        "rows a step": f"{budget.step_tokens} at most: a row for each answer, and pieces of prompts",
        "the provider sees": _VISIBLE,
        "times of calls": _TIMES,
        "ends of answers": _ENDS,
    }
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
