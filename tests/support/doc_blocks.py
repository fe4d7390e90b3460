"""Checks the types of the Python blocks of README and docs, also of those that are marked `no-run`, with mypy:
`python tests/support/doc_blocks.py`.

Each block is a module of its own, so it has to import what it uses. Only the names in `ASSUMED` may be used without, as
the text around a block says what they are. A finding names the page and the line in it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from mypy import api

ROOT = Path(__file__).resolve().parent.parent.parent
ASSUMED = {
    "client": "tenant_sdk.TenantClient",
    "config": "peft.LoraConfig",
    "prompts": "list[str]",
    "adapters": "list[str | None]",
    "MODEL": "str",
}
"""Maps each name that a block may use without defining it to its type."""
_LAX = ("--allow-untyped-defs", "--allow-untyped-calls", "--allow-incomplete-defs")
_PREAMBLE = "import peft as peft, tenant_sdk as tenant_sdk; "


def pages(root: Path = ROOT) -> list[Path]:
    """Returns the pages whose blocks are checked."""
    return [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("examples/*.md"))]


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yields the Python blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```python[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


def module(line: int, block: str) -> str:
    """Returns a module with a block at the lines that it has in its page."""
    defined = set(re.findall(r"^\s*(\w+) = ", block, re.MULTILINE)) | set(re.findall(r"\bas (\w+)\b", block))
    assumed = "; ".join(f"{name}: {kind!r}" for name, kind in ASSUMED.items() if name not in defined)
    return _PREAMBLE + assumed + "\n" * (line - 1) + block


def check(checked: list[Path], root: Path = ROOT) -> list[str]:
    """Returns mypy's findings, each with its page and line."""
    with tempfile.TemporaryDirectory() as folder:
        names: dict[str, Path] = {}
        for page in checked:
            for line, block in blocks(page):
                file = Path(folder) / f"block_{len(names)}.py"
                file.write_text(module(line, block), encoding="utf-8")
                names[file.name] = page.relative_to(root)
        if not names:
            return []
        files = [str(Path(folder) / name) for name in names]
        said, problem, code = api.run([*_LAX, "--config-file", str(ROOT / "pyproject.toml"), *files])
    found = [line for line in said.splitlines() if ": error: " in line]
    if code and not found:
        return [problem or said]
    return [_at_its_page(line, names) for line in found]


def _at_its_page(line: str, names: Mapping[str, Path]) -> str:
    """Puts a page's name in place of its block's. The folder is not compared: mypy repeats a finding that it has kept
    under the name that the file had then."""
    path, _, rest = line.partition(":")
    page = names.get(Path(path).name)
    return line if page is None else f"{page}:{rest}"


if __name__ == "__main__":
    findings = check(pages())
    print("\n".join(findings) or "the Python blocks of README and docs: no finding")
    sys.exit(bool(findings))
