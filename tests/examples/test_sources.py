"""Tests that the sources that docstrings and comments cite exist in the repository: the file, and the section or
heading in it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.support.repository import ROOT

CITING_FOLDERS = ("wire", "noise", "tenant_sdk", "provider", "attacks", "tests")
"""The folders whose citations are checked."""
_FILE = r"(?<![\w/.-])(?P<path>(?:[\w.-]+/)+[\w-]+\.md|[A-Z_]{3,}\.md)"
_PLACE = r"(?:,? section (?P<section>\d+)|, \"(?P<heading>[^\"]+)\"|, (?P<bare>[A-Z].{0,60}))?"
_CITATION = re.compile(_FILE + _PLACE)


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ +(.*\S)", path.read_text(), re.MULTILINE)


def unwrapped(source: str) -> str:
    """Returns the text of a source file on one line, without the characters that begin the lines of comments."""
    return re.sub(r"\s*\n\s*(?:#|\*(?!/))?\s*", " ", source)


def missing_sources(source: str, folder: Path = ROOT) -> list[str]:
    """Returns those citations of a source file whose file, section or heading does not exist. Links of a page start
    from its folder."""
    missing = []
    for found in _CITATION.finditer(unwrapped(source)):
        path = next((each / found["path"] for each in (ROOT, folder) if (each / found["path"]).is_file()), ROOT)
        section, heading, bare = found["section"], found["heading"], found["bare"]
        known = headings(path) if path.is_file() else []
        is_there = path.is_file()
        if section is not None:
            is_there = any(re.match(rf"{section}\b", one) for one in known)
        elif heading is not None:
            is_there = heading in known
        elif bare is not None:  # the heading has no quotation marks, as in messages
            is_there = any(bare.startswith(one) for one in known)
        if not is_there:
            missing.append(found[0])
    return missing


def comments_and_docstrings(source: str) -> str:
    """Returns a Python file's comments and docstrings, in order. Other strings of a test may name files that do not
    exist."""
    if ".md" not in source:
        return ""  # To read a file's syntax takes longer than all else here, and most files cite nothing.
    said = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            said.append((token.start[0], token.string))
    return "\n".join(text for _, text in sorted(said))


def sources(folder: str) -> dict[Path, str]:
    """Returns the text of each source file and page below a folder. Of tests in Python, only comments and docstrings
    are included."""
    paths = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h", ".md"))
    texts = {path: path.read_text() for path in paths}
    return {
        path: comments_and_docstrings(text) if folder == "tests" and path.suffix == ".py" else text
        for path, text in texts.items()
    }


@pytest.mark.parametrize("folder", CITING_FOLDERS)
def test_cited_sources_exist(folder: str) -> None:
    texts = sources(folder)
    assert any(_CITATION.search(unwrapped(text)) for text in texts.values())
    missing = {str(path.relative_to(ROOT)): missing_sources(text, path.parent) for path, text in texts.items()}
    assert {path: citations for path, citations in missing.items() if citations} == {}


@pytest.mark.parametrize(
    "cited",
    [
        "DESIGN.md, section 3",
        "DESIGN.md section 3",
        "wire/SPEC.md, section 99",
        "docs/no-such-page.md",
        'docs/masks.md, "no such heading"',
        "docs/operations.md, No such heading",
        "wire/SPEC.md,\n    # section 99",
        'docs/threat-model.md, "Who is\n * nowhere"',
    ],
)
def test_missing_source_is_found(cited: str) -> None:
    assert len(missing_sources(f"the bound ({cited}).")) == 1


@pytest.mark.parametrize(
    "cited",
    [
        "wire/SPEC.md, section 5",
        "wire/SPEC.md,\n    # section 5",
        'docs/threat-model.md, "Who is\n    trusted"',
        "docs/operations.md, Recording",
        "docs/decisions/0004-ledger.md",
        "README.md",
    ],
)
def test_source_that_exists_is_accepted(cited: str) -> None:
    assert _CITATION.search(unwrapped(f"the bound ({cited})."))
    assert missing_sources(f"the bound ({cited}).") == []


def test_what_a_test_says_is_looked_at_and_its_other_strings_are_not() -> None:
    source = '''"""Checks the bound\nof docs/no-such-page.md."""
LIMIT = 3
"""From DESIGN.md, section 3."""
names = ["docs/not-cited.md"]  # as wire/SPEC.md,
# section 99 says
'''
    cited = ["docs/no-such-page.md", "DESIGN.md, section 3", "wire/SPEC.md, section 99"]
    assert missing_sources(comments_and_docstrings(source)) == cited
