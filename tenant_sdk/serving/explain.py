"""This module writes the text that `Engine.explain` prints: how many requests fit, and what the provider sees."""

from __future__ import annotations

from tenant_sdk.generate import DEFAULT_NEW_TOKENS
from tenant_sdk.serving.kv import KvLayout
from tenant_sdk.serving.prefix_cache import BLOCK_TOKENS, block_bytes
from tenant_sdk.serving.scheduler import Budget

_LENGTHS = (1024, 8192, 32768)
"""The request lengths, in tokens, for which the text says how many requests fit."""
_VISIBLE = (
    "the rows of every step, summed over all requests: prompts that join, as far as lengths and numbers show in the "
    "sums, and answers that end; not which row is whose, nor which adapter"
)
_DORA = (
    "show when they are brought into host memory, by calls with as many rows as their ranks add up to in each layer "
    "group; steps with them look like any other"
)
_TIMES = "show, and with them the tenant's own work between calls, which takes longer with some kinds of adapters"
_ENDS = (
    "show, unless fixed_length=True: then the rows go on to the length limit, and only the limit and the time of the "
    "request show"
)
_ENDS_EARLIER = (
    "show. The number of steps of an answer shows how many drafted tokens were accepted, so how well its text can be "
    "foretold, or how much it copies"
)
"""The line about the ends of answers for an engine with speculation, which refuses fixed_length."""


_GROWS = (
    "grows with their answers. If it runs out, the request that began last waits, and its tokens are computed again: "
    "the provider sees rows as of a prompt"
)
_GROWS_NOT = ". A request with fixed_length=True has all its memory from the beginning"
_HITS = (
    "to the provider, a request whose prompt begins like an earlier one of the same caller and adapter shows as a "
    "shorter prompt, in steps of {tokens} tokens; to other callers, only that the room for kept prompts is used. A "
    "request with fixed_length=True neither uses nor leaves a kept prompt"
)


def explain(
    layout: KvLayout, budget: Budget, context_length: int, prefix_bytes: int = 0, adapters: str = "",
    default_new_tokens: int = DEFAULT_NEW_TOKENS,
) -> str:  # fmt: skip
    """Returns the text, one line for each topic.

    Args:
        layout: how keys and values are kept.
        budget: the scheduler's limits.
        context_length: the most tokens of a request, prompt and answer together.
        prefix_bytes: the most bytes of kept prompts.
        adapters: how many adapters fit; see `AdapterSlots.describe`.
        default_new_tokens: the length limit of an answer without one of its own, to an empty prompt.
    """
    lengths = sorted({min(length, context_length) for length in _LENGTHS})
    fitting = ", ".join(
        f"{min(budget.kv_bytes // layout.bytes_for(length), budget.max_running)} of {length} tokens"
        for length in lengths
    )
    kept = f"{budget.kv_bytes / 1e6:.0f} MB of KV ({str(layout.dtype).removeprefix('torch.')})"
    drafted = budget.num_drafted
    answers = f"{1 + drafted} rows for each answer, whatever is drafted" if drafted else "a row for each answer"
    lines = {
        "tokens of a request": f"{context_length} at most, prompt and answer together",
        "answers without a limit": f"{default_new_tokens} tokens at most, fewer where the prompt leaves fewer",
        "requests at a time": f"{budget.max_running} at most; in {kept} {fitting}",
        "memory of requests": _GROWS if drafted else _GROWS + _GROWS_NOT,
        "rows a step": f"{budget.step_tokens} at most: {answers}, and pieces of prompts",
        **({"adapters that fit": adapters} if adapters else {}),
        "the provider sees": _VISIBLE,
        "adapters with DoRA": _DORA,
        "times of calls": _TIMES,
        "ends of answers": _ENDS_EARLIER if drafted else _ENDS,
    }
    if prefix_bytes:
        num_tokens = prefix_bytes // block_bytes(layout) * BLOCK_TOKENS
        lines["kept prompts"] = f"{prefix_bytes / 1e6:.0f} MB beside the KV of running requests, {num_tokens} tokens"
        lines["hits on kept prompts"] = _HITS.format(tokens=BLOCK_TOKENS)
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
