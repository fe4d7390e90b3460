"""This module defines the interface of a drafter, which guesses the next tokens of requests for the engine. It also has
a drafter that needs no model, `PromptLookup`.

`PromptLookup` finds an earlier occurrence of a text's last tokens, and drafts the tokens that followed there. It pays
off if answers copy from their prompts, as in summaries, corrections and code.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from tenant_sdk.serving.kv import KvLayout
from tenant_sdk.serving.requests import Request
from tenant_sdk.serving.scheduler import Segment


class Drafter(Protocol):
    """Drafts tokens (guesses the next ones) at the tenant. Only the engine's thread uses a drafter."""

    @property
    def layout(self) -> KvLayout | None:
        """Returns the layout of the keys and values that the drafter keeps of each request; None if it keeps none."""

    def draft(self, segments: Sequence[Segment], requests: Sequence[Request]) -> None:
        """Sets the drafted tokens of each request that has rows for them in the step. A request may get fewer tokens
        than rows, or none.

        Args:
            segments: the segments of the step that comes next.
            requests: the request of each segment.
        """


def most_drafted(segment: Segment, request: Request) -> int:
    """Returns the most tokens that may be drafted for a segment of a request."""
    return max(min(segment.num_drafted, request.num_draftable), 0)


_LONGEST = 5
"""The most last tokens of a text that are searched for. The longer the sequence that occurred before, the likelier the
text goes on as it did there."""


class PromptLookup:
    """Drafts from each request's own tokens."""

    layout = None

    def draft(self, segments: Sequence[Segment], requests: Sequence[Request]) -> None:
        """Sets the drafted tokens of each request; see `Drafter.draft`."""
        for segment, request in zip(segments, requests, strict=True):
            request.drafted = continuation(request.known_ids, most_drafted(segment, request))


def continuation(token_ids: Sequence[int], num_wanted: int) -> list[int]:
    """Returns the tokens that followed an earlier occurrence of the last tokens of a text.

    As many last tokens as possible are looked for. If they occurred several times, the latest occurrence counts. If the
    text ends before there are enough tokens, the tokens after the occurrence are repeated.

    Args:
        token_ids: the tokens of the text.
        num_wanted: the number of tokens to return.

    Returns:
        `num_wanted` tokens, or none if the last token did not occur before.
    """
    if num_wanted < 1:
        return []
    text = array("Q", token_ids)
    for size in range(min(_LONGEST, len(text) - 1), 0, -1):
        place = _last_place(text, size)
        if place is not None:
            return _copied(token_ids, place + size, num_wanted)
    return []


def _last_place(text: array[int], size: int) -> int | None:
    """Returns the index of the latest earlier occurrence of the last `size` tokens; None if there is none."""
    content, sought, width = text.tobytes(), text[-size:].tobytes(), text.itemsize
    end = len(content) - width
    while (found := content.rfind(sought, 0, end)) >= 0:
        if found % width == 0:
            return found // width
        end = found + len(sought) - 1  # These bytes begin in the middle of a token.
    return None


def _copied(token_ids: Sequence[int], begin: int, num_wanted: int) -> list[int]:
    copied: list[int] = list(token_ids[begin : begin + num_wanted])
    period = len(token_ids) - begin
    while len(copied) < num_wanted:
        copied.append(copied[-period])
    return copied
