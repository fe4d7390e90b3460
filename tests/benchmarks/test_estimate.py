"""Tests `make estimate` with a stand-in for the estimator: which checkout it accepts, and what it says if numbers agree
or differ.

The real estimator and Sage are not installed here. So these tests show that the command compares numbers, not that the
numbers are right.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import estimate
from noise.params import PARAMETERS, REFUSED, choose
from tests.support.repository import ROOT
from tests.support.waiting import WAIT_S
from wire.errors import WeakParameters

BITS = {1536: 161, 2048: 219, 1280: 149, 1024: 106}
STAND_IN = """
from sage.all import oo
class Parameters:
    def __init__(self, n, q, Xs, Xe, m):
        assert (q, Xs, m) == (2**32, "mod 3", oo)
        assert Xe == {1280: 32.0}.get(n, 3.2)
        self.n = n
class ND:
    UniformMod = staticmethod(lambda q: f"mod {q}")
    DiscreteGaussian = float
class RC:
    MATZOV, ADPS16 = "MATZOV", "core-SVP"
def attack(above):
    def cost(problem, red_cost_model):
        return {"rop": 2.0 ** (BITS[problem.n] + above - 23 * (red_cost_model == "core-SVP"))}
    return staticmethod(cost)
class LWE:
    Parameters = Parameters
    primal_usvp, primal_bdd, dual_hybrid = attack(2), attack(0), attack(5)
"""


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a git repository that holds the stand-in, and makes the command expect this repository."""
    folder = tmp_path / "checkout"
    (folder / "estimator").mkdir(parents=True)
    git(folder, "init", "--quiet")
    commit(folder, BITS)
    monkeypatch.setattr(estimate, "COMMIT", git(folder, "rev-parse", "HEAD"))
    return folder


def commit(folder: Path, bits: dict[int, float]) -> None:
    (folder / "estimator" / "__init__.py").write_text(f"BITS = {bits}\n{STAND_IN}")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "as it is")


@pytest.fixture
def sage(tmp_path: Path) -> Path:
    """Makes an environment whose Python finds a module `sage` with the one name that is needed."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "sage").mkdir()
    (folder / "sage" / "__init__.py").touch()
    (folder / "sage" / "all.py").write_text("oo = float('inf')\n")
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = estimate.main([str(each) for each in arguments])
    said = capfd.readouterr()
    return status, said.out, said.err


def refusal(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    status, _, err = run(capfd, *arguments)
    assert status == 1
    assert err.startswith("estimate: ")
    assert err.count("\n") == 1
    return err


def test_numbers_that_agree(checkout: Path, sage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capfd, checkout, "--sage", sage)
    assert (status, err) == (0, "")
    assert "| default | 1536 | 3.2 | 163.0 | 161.0 | 166.0 | 161 | 140.0 |" in out
    assert "| lean | 1280 | 32 | 151.0 | 149.0 | 154.0 | 149 | 128.0 |" in out
    assert out.count("\n| ") == 4
    assert out.endswith("all within 1 bit of noise/params.py\n")
    assert git(checkout, "status", "--porcelain") == "", "the checkout stays as it was"


@pytest.mark.parametrize(
    ("dimension", "name"), [(1536, "default"), (2048, "conservative"), (1280, "lean"), (1024, "1024")]
)
@pytest.mark.parametrize("off", [-2.0, 2.0])
def test_two_bits_off_fails_and_names_the_set(
    checkout: Path, sage: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    dimension: int, name: str, off: float,
) -> None:  # fmt: skip
    commit(checkout, BITS | {dimension: BITS[dimension] + off})
    monkeypatch.setattr(estimate, "COMMIT", git(checkout, "rev-parse", "HEAD"))
    said = refusal(capfd, checkout, "--sage", sage)
    assert f"more than 1 bit apart: {name}: {BITS[dimension] + off:.1f} bits, noise/params.py says" in said
    assert said.count("says") == 1


@pytest.mark.parametrize(("off", "is_said"), [(-1.0, False), (1.0, False), (-1.05, True), (1.05, True)])
def test_one_bit_is_allowed(off: float, is_said: bool) -> None:
    row = PARAMETERS["default"]
    found = {"uSVP": 170.0, "BDD": row.bits + off, "dual-hybrid": 171.0, "core-SVP": 1.0}
    assert (estimate.difference(row, found) is not None) is is_said


def test_the_commit_is_looked_at(checkout: Path, sage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = estimate.COMMIT
    commit(checkout, BITS | {1536: 161.5})
    head = git(checkout, "rev-parse", "HEAD")
    said = refusal(capfd, checkout, "--sage", sage)
    assert f"is at {head[:7]}, expected {expected[:7]}: git -C {checkout} checkout {expected}" in said


def test_changes_in_the_checkout_are_refused(checkout: Path, sage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = checkout / "estimator" / "__init__.py"
    file.write_text(file.read_text() + "# a change\n")
    assert "has changes of its own" in refusal(capfd, checkout, "--sage", sage)


def test_what_is_no_checkout(checkout: Path, tmp_path: Path, sage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "plain", checkout / "estimator"):
        said = refusal(capfd, folder, "--sage", sage)
        assert "expected the root of a git checkout" in said
        assert str(folder) in said
    assert "make estimate ESTIMATOR=DIR" in refusal(capfd, "", "--sage", sage)


def test_an_environment_without_sage(checkout: Path, sage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (sage / "sage" / "all.py").unlink()
    assert "has no Sage" in refusal(capfd, checkout, "--sage", sage)
    (sage / "bin" / "python").unlink()
    assert "has no Sage" in refusal(capfd, checkout, "--sage", sage)


def test_wheels_that_cannot_be_installed(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment that was begun is removed, so that the next run starts afresh."""

    def create(folder: Path, with_pip: bool) -> None:
        assert with_pip
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 1\n')
        python.chmod(0o755)

    monkeypatch.setattr(estimate.venv, "create", create)
    assert "pip could not install" in refusal(capfd, checkout, "--sage", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "asked").read_text() == f"-m pip install --quiet {estimate.SAGE}\n"


def test_make_says_it_in_one_line(tmp_path: Path) -> None:
    for words, expected in (
        ([], f"estimate: name a checkout of lattice-estimator at {estimate.COMMIT[:7]}: make estimate ESTIMATOR=DIR"),
        (
            [f"ESTIMATOR={tmp_path}"],
            f"estimate: expected the root of a git checkout of lattice-estimator, got {tmp_path}",
        ),
    ):
        done = subprocess.run(
            ["make", "--no-print-directory", "estimate", f"PYTHON={sys.executable}", *words], cwd=ROOT, check=False,
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode != 0
        ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        assert ours == [expected]


def test_the_rows_are_those_of_the_documents() -> None:
    assert {row.dimension: row.bits for row in estimate.ROWS} == BITS
    with pytest.raises(WeakParameters):
        choose(REFUSED)
    text = (ROOT / "docs" / "parameters.md").read_text()
    assert f"git checkout {estimate.COMMIT}" in text
    assert "make estimate ESTIMATOR=" in text


def test_nothing_but_the_standard_library_is_imported_outside_sage() -> None:
    """The environment of Sage has none of this repository's dependencies."""
    code = textwrap.dedent("""
        import sys
        import benchmarks.estimate
        print([name for name in ("torch", "numpy", "cryptography", "sage") if name in sys.modules])
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
