"""Counts how often tests use private attributes, and prints where: `python tests/repository/private_reaches.py`.

A reach is an attribute `something._name` of anything except `self` and `cls`, an import of such a name, or its text in
a call of `setattr`, `getattr`, `delattr` or `hasattr`. (pytest's `monkeypatch` has the first and the third of these.)
Names with two leading underscores do not count, since Python itself defines their meaning.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
_BY_NAME = ("setattr", "getattr", "delattr", "hasattr")


def is_private(name: str) -> bool:
    """Returns whether a name has exactly one leading underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def reaches(tree: ast.AST) -> Iterator[str]:
    """Yields the private names that the code of one file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call):
            yield from _named_in_call(node)


def _named_in_call(call: ast.Call) -> Iterator[str]:
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called in _BY_NAME:
        texts = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        yield from (name for name in (text.rpartition(".")[2] for text in texts) if is_private(name))


def count(folder: Path = TESTS) -> collections.Counter[str]:
    """Returns the number of reaches in each file below a folder that has any, by the file's path relative to the parent
    folder.

    No file is left out, neither helpers nor conftest files, nor this file.
    """
    found: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.rglob("*.py")):
        number = sum(1 for _ in reaches(ast.parse(path.read_text(encoding="utf-8"))))
        if number:
            found[path.relative_to(folder.parent).as_posix()] = number
    return found


if __name__ == "__main__":
    counted = count()
    for name, number in counted.most_common():
        print(f"{number:4d} {name}")
    print(f"{counted.total():4d} in all")
