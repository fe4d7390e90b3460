"""Makes the fixtures of tests/support that tests of serving share known to pytest."""

from __future__ import annotations

from tests.support.engines import batch_calls  # noqa: F401
