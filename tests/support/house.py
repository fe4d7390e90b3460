"""Counts what tells how a tree of Python files is cut: `python -m tests.support.house [FOLDER]`.

Only files outside tests/ count. A header is what stands before a file's first definition: its docstring and imports. A
name is private to its file if it begins with one underscore; an import of such a name from another file, or a use of it
through a module's name, is a reach.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Figures:
    """Holds the counts of one tree.

    Attributes:
        files: the number of files, packages' `__init__.py` included.
        median_lines, most_lines: of these files.
        short: the files of fewer than 60 lines, without `__init__.py`.
        header_share, import_share: the lines of headers, and of imports, as parts of all lines.
        one_statement: the functions with a docstring over a body of one statement.
        reaches: the imports and uses of other files' private names.
    """

    files: int
    median_lines: float
    most_lines: int
    short: int
    header_share: float
    import_share: float
    one_statement: int
    reaches: int


def sources(root: Path) -> list[Path]:
    """Returns the Python files that git knows outside tests/."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, check=True, capture_output=True, text=True)
    return [root / name for name in listed.stdout.split() if not name.startswith("tests/")]


def count(root: Path = ROOT) -> Figures:
    """Returns the figures of the tree at `root`."""
    files = sources(root)
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in files}
    lines: list[int] = []
    header = imports = one_statement = reaches = 0
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines.append(text.count("\n"))
        header += _header_lines(tree)
        imports += sum(_span(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
        one_statement += sum(_is_one_statement(node) for node in ast.walk(tree))
        reaches += sum(1 for _ in _reaches(tree, modules))
    short = sum(size < 60 for size, path in zip(lines, files, strict=True) if path.name != "__init__.py")
    total = sum(lines)
    return Figures(
        len(files), statistics.median(lines), max(lines), short, header / total, imports / total, one_statement, reaches
    )


def _span(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _header_lines(tree: ast.Module) -> int:
    """Returns the number of lines before a file's first statement that is neither docstring nor import."""
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (is_docstring or is_typing_only or isinstance(node, ast.Import | ast.ImportFrom)):
            return node.lineno - 1
    return tree.body[-1].end_lineno or 0 if tree.body else 0


def _is_one_statement(node: ast.AST) -> bool:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and ast.get_docstring(node) is not None and len(node.body) == 2


def _reaches(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yields each use of another file's private name."""
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                if f"{node.module}.{each.name}" in modules:
                    known.add(each.asname or each.name)
                elif node.module in modules and _is_private(each.name):
                    yield each.name
    for node in ast.walk(tree):
        is_use = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known
        if is_use and _is_private(node.attr):
            yield node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


if __name__ == "__main__":
    for name, value in vars(count(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)).items():
        print(f"{name:14} {value:.3f}" if isinstance(value, float) else f"{name:14} {value}")
