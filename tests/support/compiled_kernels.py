"""Marks tests that need compiled kernels, and runs the tests of a module with and without these kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from noise.polynomial import kernels as transforms
from wire.ring import kernels as products

needs_products = pytest.mark.skipif(not products.available(), reason="no compiled kernels on this machine")
"""A mark for tests that need the compiled products and codecs of wire/ring/."""
needs_transforms = pytest.mark.skipif(not transforms.available(), reason="no compiled transforms on this machine")
"""A mark for tests that need the compiled transforms of noise/polynomial/."""


def compiled_and_torch(kernels: ModuleType, needs: pytest.MarkDecorator) -> Any:
    """Returns a fixture that runs each test of a module twice: with compiled kernels, if there are any, and with
    torch's kernels."""
    forms = [pytest.param(True, marks=needs, id="compiled"), pytest.param(False, id="torch")]

    @pytest.fixture(scope="module", params=forms)
    def is_compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
        with pytest.MonkeyPatch.context() as patch:
            if not request.param:
                patch.setattr(kernels, "available", lambda: False)
            yield request.param

    return is_compiled
