"""Fixtures that the tests of the provider share: a served model, and an executor that stands still until it is told."""

from tests.support.executor_gate import gate  # noqa: F401
from tests.support.served_llama import served_model  # noqa: F401
