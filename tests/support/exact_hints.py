"""Makes hints whose numbers are all known, and a provider that serves the rows of such a hint to a hint store."""

from __future__ import annotations

import torch

from noise.hints.file import Hint
from noise.hints.store import HintKey, HintStore
from wire.errors import Unavailable
from wire.frame import Direction

ROWS = 48
"""The number of rows of a hint, unless a test gives another one."""
KEY = HintKey("a" * 64, bytes(range(32)), 3, Direction.FORWARD)
"""The key of the hint that a test stores."""
EDGES = [-(2**31), 2**31 - 1, -1, 0, 1, 127, 128, -128, -129, 2**31 - 128, 2**31 - 129, 2047, 2048, -2048, 511, 512]
"""Numbers at which rounding changes its direction, and numbers at which int32 wraps."""


def exact_hint(features: int, rows: int = ROWS) -> torch.Tensor:
    """Returns an int32 hint, shape (rows, features), that includes all numbers of `EDGES`."""
    generator = torch.Generator().manual_seed(features)
    hint = torch.randint(-(2**31), 2**31, (rows, features), generator=generator).to(torch.int32)
    hint.view(-1)[: len(EDGES)] = torch.tensor(EDGES, dtype=torch.int64).to(torch.int32)
    return hint


class Provider:
    """Serves the rows of a hint. The request with the number `fail_at`, counted from 0, fails; None lets all
    succeed."""

    def __init__(self, hint: torch.Tensor, fail_at: int | None = None) -> None:
        self.hint, self.fail_at = hint, fail_at
        self.asked: list[range] = []
        self.in_flight = self.most_in_flight = 0

    def fetch(self, first_row: int, num_rows: int) -> Reply:
        """Begins a request for these rows, and notes it."""
        self.asked.append(range(first_row, first_row + num_rows))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Reply(self, len(self.asked) - 1)

    def get(self, store: HintStore, key: HintKey = KEY, **options: object) -> Hint:
        """Returns the hint from a store that fetches its rows from this provider."""
        return store.get(key, (self.hint.shape[0], self.hint.shape[1]), self.fetch, **options)  # type: ignore[arg-type]


class Reply:
    """Stands for rows that were requested and have not arrived yet."""

    def __init__(self, provider: Provider, number: int) -> None:
        self.provider, self.number = provider, number

    def result(self) -> torch.Tensor:
        """Returns the rows, or raises the error of the request that should fail."""
        self.provider.in_flight -= 1
        if self.number == self.provider.fail_at:
            raise Unavailable("the provider went away")
        rows = self.provider.asked[self.number]
        return self.provider.hint[rows.start : rows.stop]
