"""Tests that the Python blocks of docs, also those that nothing runs, are checked for names and types."""

from __future__ import annotations

import pytest

from tests.support.doc_blocks import check

GOOD = """# A page

```python no-run
from tenant_sdk import TenantClient

text: str = TenantClient(identity="acme").generate("who?")
```
"""
BAD = (
    ("from tenant_sdk import TenantClient", "", 'page.md:6: error: Name "TenantClient" is not defined'),
    ("identity=", "identiti=", 'page.md:6: error: Unexpected keyword argument "identiti"'),
    ("generate(", "generate_text(", 'page.md:6: error: "TenantClient" has no attribute "generate_text"'),
)
"""What makes the good page a bad one: a text of it, the text that replaces it, and the finding."""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Provides the findings about the good page and the bad ones, each in a folder of its own. They are checked
    together, since mypy reads the whole SDK each time."""
    root = tmp_path_factory.mktemp("pages")
    texts = {"good": GOOD} | {right: GOOD.replace(right, wrong) for right, wrong, _ in BAD}
    pages = [root / str(number) / "page.md" for number in range(len(texts))]
    for page, text in zip(pages, texts.values(), strict=True):
        page.parent.mkdir()
        page.write_text(text)
    return check(pages, root)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 1 + len(BAD)))
def test_a_block_that_cannot_be_is_found_at_its_line(findings: list[str], number: int) -> None:
    expected = f"{number}/{BAD[number - 1][2]}"
    assert [line[: len(expected)] for line in findings if line.startswith(f"{number}/")] == [expected]


@pytest.mark.slow
def test_a_block_that_can_be_is_not(findings: list[str]) -> None:
    assert [line for line in findings if not line.startswith(("1/", "2/", "3/"))] == []
