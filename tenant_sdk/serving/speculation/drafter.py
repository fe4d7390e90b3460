"""This module defines the interface of a drafter, which guesses the next tokens of requests for the engine."""

from __future__ import annotations

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
