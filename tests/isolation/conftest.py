"""Provides fixtures that the provider's tests use, too: a served model, and an executor that waits until the test opens
it."""

from tests.support.executors import gate  # noqa: F401
from tests.support.providers import served_model  # noqa: F401
