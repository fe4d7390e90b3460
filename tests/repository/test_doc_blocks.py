"""Tests that the Python blocks of docs, also those that nothing runs, are checked for names and types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doc_blocks import check

GOOD = """# A page

```python no-run
from tenant_sdk import TenantClient

text: str = TenantClient(identity="acme").generate("who?")
```
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("from tenant_sdk import TenantClient", "", 'page.md:6: error: Name "TenantClient" is not defined'),
        ("identity=", "identiti=", 'page.md:6: error: Unexpected keyword argument "identiti"'),
        ("generate(", "generate_text(", 'page.md:6: error: "TenantClient" has no attribute "generate_text"'),
    ],
)
def test_a_block_that_cannot_be_is_found_at_its_line(tmp_path: Path, right: str, wrong: str, expected: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD.replace(right, wrong))
    assert [line[: len(expected)] for line in check([page], tmp_path)] == [expected]


@pytest.mark.slow
def test_a_block_that_can_be_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    assert check([page], tmp_path) == []
