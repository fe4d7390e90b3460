"""A tiny model's core, and an executor that stands still until it is told."""

from tests.provider.conftest import served_model  # noqa: F401 - fixtures
from tests.provider.engine.test_executor import gate  # noqa: F401
