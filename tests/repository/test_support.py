"""Tests that shared helpers are in tests/support and have docstrings, and that tests use few private attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository import private_reaches
from tests.support.repository import ROOT

MOST_REACHES = 91
"""The most places at which tests may use private attributes of the code that they test. This number may only fall."""
PROGRAMS = {
    "tests.repository.private_reaches": "a program, run by hand: only its own test imports it",
    "tests.vectors.make_lattice_vectors": "a program that makes the vectors beside it: tests run it again to compare",
    "tests.vectors.make_vectors": "a program that makes the vectors beside it: its test runs it again to compare",
}
"""Maps modules outside of tests/support that a test module may import to the reason."""
DOTTED = re.compile(r"\btests(?:\.\w+)+")


def name_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def modules(root: Path) -> dict[str, Path]:
    """Returns every Python file of tests/, by its module name."""
    return {name_of(path, root): path for path in sorted((root / "tests").rglob("*.py"))}


def absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """Returns the full name of the module in an import, also if dots stand for parent folders."""
    if not node.level:
        return node.module or ""
    folder = ".".join(path.relative_to(root).parts[: -node.level])
    return f"{folder}.{node.module}" if node.module else folder


def named(path: Path, root: Path) -> Iterator[str]:
    """Returns every dotted name that a file imports, and names of test modules in its strings (plugins, code for a
    child process).

    A module beside the file counts with its full name, as Python would find it if the folder were on its path.
    """
    beside = {one.stem for one in path.parent.glob("*.py")}
    folder = ".".join(path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{absolute(node, path, root)}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from DOTTED.findall(node.value)
        yield from (f"{folder}.{name}" if name.partition(".")[0] in beside else name for name in found)


def imports(root: Path) -> dict[Path, set[str]]:
    """Returns the test modules that each file of tests/ names. Of each dotted name, the longest beginning that is a
    file counts."""
    known = modules(root)

    def longest(name: str) -> str:
        parts = name.split(".")
        beginnings = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
        return next((one for one in beginnings if one in known), "tests")

    return {path: {longest(name) for name in named(path, root)} - {"tests", own} for own, path in known.items()}


def is_shared(module: str) -> bool:
    return module == "tests.support" or module.startswith("tests.support.")


def forbidden_imports(root: Path, found: dict[Path, set[str]] | None = None) -> list[str]:
    """Returns the imports between tests other than of tests/support, as `file: module`. An empty file counts as no
    module. `found` is what `imports` returns, if it was called before."""
    known = modules(root)
    return [
        f"{path.relative_to(root)}: {module}"
        for path, named_there in (imports(root) if found is None else found).items()
        for module in sorted(named_there)
        if not is_shared(module) and module not in PROGRAMS and known[module].stat().st_size
    ]


SENTENCE = re.compile(r"[A-Z`(\d].*?[.:](?=\s|$)", re.DOTALL)


def public(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    """Yields the name and the docstring of each public function, class and method. Methods of protocols are left
    out."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not (isinstance(node.body[0], ast.Expr) and ast.unparse(node.body[0]) == "..."):
                yield node.name, ast.get_docstring(node)
            if isinstance(node, ast.ClassDef):
                yield from ((f"{node.name}.{name}", text) for name, text in public(node))


def without_docstring(path: Path) -> list[str]:
    """Returns the public names of a file whose docstring is missing or does not begin with a sentence, and the file
    itself if this is so for its own."""
    tree = ast.parse(path.read_text())
    said = {path.stem: ast.get_docstring(tree), **dict(public(tree))}
    return [name for name, text in said.items() if not SENTENCE.match(text or "")]


@pytest.fixture(scope="module")
def imported() -> dict[Path, set[str]]:
    return imports(ROOT)


def test_no_test_module_imports_another_one(imported: dict[Path, set[str]]) -> None:
    assert any(imported.values())
    assert forbidden_imports(ROOT, imported) == []


def test_exceptions_are_programs_and_are_needed(imported: dict[Path, set[str]]) -> None:
    known = modules(ROOT)
    assert set(PROGRAMS) <= set().union(*imported.values())
    assert all('if __name__ == "__main__":' in known[module].read_text() for module in PROGRAMS)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Makes a repository with two folders of tests, one of which must not import the other."""
    for name in ("tests/support", "tests/one", "tests/two"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "tests/one/test_a",
        "tests/one/conftest",
        "tests/one/helper",
        "tests/support/waiting",
        "tests/__init__",
    ):
        (tmp_path / f"{name}.py").write_text('"""Says something."""\n' if name != "tests/__init__" else "")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from tests.one.test_a import thing", "test_a"),
        ("from tests.one import test_a", "test_a"),
        ("import tests.one.test_a", "test_a"),
        ("import tests.one.test_a as other", "test_a"),
        ("def late():\n    from tests.one.conftest import thing", "conftest"),
        ("from ..one.helper import thing", "helper"),
        ("from ..one import helper", "helper"),
        ("pytest_plugins = ['tests.one.helper']", "helper"),
        ("CHILD = '''\nfrom tests.one.helper import thing\n'''", "helper"),
        ("import importlib\nimportlib.import_module('tests.one.test_a')", "test_a"),
    ],
)
@pytest.mark.parametrize("file", ["tests/two/test_b.py", "tests/two/conftest.py", "tests/support/other.py"])
def test_a_planted_import_is_found(planted: Path, file: str, code: str, module: str) -> None:
    (planted / file).write_text(f"{code}\n")
    assert forbidden_imports(planted) == [f"{file}: tests.one.{module}"]


@pytest.mark.parametrize("code", ["from conftest import thing", "import helper", "from . import test_a"])
def test_a_planted_import_of_a_module_beside_it_is_found(planted: Path, code: str) -> None:
    (planted / "tests/one/test_b.py").write_text(f"{code}\n")
    (found,) = forbidden_imports(planted)
    assert found.startswith("tests/one/test_b.py: tests.one.")


@pytest.mark.parametrize(
    "code",
    [
        "from tests.support.waiting import until",
        "from tests.support import waiting",
        "import tests.support.waiting",
        "from ..support import waiting",
        "import helper",
        "from tests import nothing",
        "SAID = 'tests.one.no_such_module'",
    ],
)
def test_an_import_of_what_is_shared_is_none(planted: Path, code: str) -> None:
    (planted / "tests/two/test_b.py").write_text(f"{code}\n")
    assert forbidden_imports(planted) == []


def test_every_shared_helper_has_a_docstring() -> None:
    files = sorted((ROOT / "tests" / "support").glob("*.py"))
    missing = {path.name: without_docstring(path) for path in files if path.stat().st_size}
    assert len(missing) > 10
    assert {name: found for name, found in missing.items() if found} == {}


def test_a_planted_helper_without_a_docstring_is_found(tmp_path: Path) -> None:
    path = tmp_path / "helper.py"
    path.write_text(
        '''"""Helps."""

def bare():
    pass

class Bare:
    """of a model"""

    def act(self):
        pass

    def _own(self):
        pass

class Protocol:
    """Says what others do."""

    def act(self): ...
'''
    )
    assert without_docstring(path) == ["bare", "Bare", "Bare.act"]


def test_tests_reach_into_few_private_attributes() -> None:
    assert private_reaches.TESTS == ROOT / "tests"
    assert private_reaches.count(private_reaches.TESTS).total() <= MOST_REACHES


def test_every_file_is_counted_and_every_kind_of_reach(tmp_path: Path) -> None:
    """Helpers count like tests, so moving a reach into a helper does not make the number smaller."""
    files = ["tests/conftest.py", "tests/support/one.py", "tests/repository/test_support.py", "tests/.hidden/deep/a.py"]
    code = "from a import _b\nc._d = e._f\nsetattr(g, '_h', 1)\nself._i = cls._j = k.__dict__\n"
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    assert private_reaches.count(tmp_path / "tests") == dict.fromkeys(files, 4)
