"""Marks tests of compiled kernels, and runs the tests of a module with them and without."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from noise.polynomial import kernels as transforms
from wire.ring import kernels as products

needs_products = pytest.mark.skipif(not products.available(), reason="no compiled kernels on this machine")
"""Marks what needs the compiled products and codecs of wire/ring/."""
needs_transforms = pytest.mark.skipif(not transforms.available(), reason="no compiled transforms on this machine")
"""Marks what needs the compiled transforms of noise/polynomial/."""


def compiled_and_torch(kernels: ModuleType, needs: pytest.MarkDecorator) -> Any:
    """Makes a fixture of a module whose tests run with compiled kernels, where there are any, and with torch's own."""
    forms = [pytest.param(True, marks=needs, id="compiled"), pytest.param(False, id="torch")]

    @pytest.fixture(scope="module", params=forms)
    def is_compiled(request: pytest.FixtureRequest) -> Iterator[bool]:
        with pytest.MonkeyPatch.context() as patch:
            if not request.param:
                patch.setattr(kernels, "available", lambda: False)
            yield request.param

    return is_compiled
