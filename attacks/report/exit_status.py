"""Runs the work of a command line. Before that it checks the output folder. A request that is impossible ends with one
line of text. It also makes the parsers of programs, since arguments are parsed before torch is imported. What
transformers and PEFT say besides (progress bars, warnings about their own names) is not shown."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from attacks.report.stages import say
from runtime.stopping import at_once, told_when_stopped
from wire.errors import VeilbaseError

_LOADING = "{}: loading torch and transformers"


def out_parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m attacks.PROGRAM` for a program whose only option is --out."""
    parser = argparse.ArgumentParser(prog=f"python -m attacks.{program}", description=docstring_of(program))
    out = Path("report")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of {program}.json and {program}.md")
    return parser


def docstring_of(program: str) -> str | None:
    """Returns the docstring of a module of attacks/programs without importing the module, which loads torch."""
    source = Path(__file__).parents[1] / "programs" / f"{program}.py"
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))


def run_program(name: str, arguments: Sequence[str] | None) -> int:
    """Loads a program of attacks/programs, which takes seconds, runs it, and returns its exit status. Ctrl-C ends it
    with one line.

    Args:
        name: the module's name.
        arguments: the command line's arguments, which were checked already; None for those of the process.
    """
    program = f"attacks.{name}"
    with told_when_stopped(program):
        say(_LOADING.format(program))
        with at_once(program):
            loaded = importlib.import_module(f"attacks.programs.{name}")
        return int(loaded.main(arguments))


def exit_status(
    program: str, out: Path | None, work: Callable[[], int], check: Callable[[], object] = lambda: None
) -> int:
    """Runs `work` and returns its exit status. If the folder cannot be used, or if `check` or `work` raises a
    VeilbaseError or an OSError, prints one line on standard error and returns 2.

    Args:
        program: the program's name, as after `python -m`.
        out: a folder to make before any work is done; None makes none.
        work: a function that does the work and returns the exit status.
        check: a function that checks the command line, without torch and before the folder is made.
    """
    try:
        check()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass  # checks that the folder is writable
        if "torch" not in sys.modules:
            say(_LOADING.format(program))
        with at_once(program):
            from runtime.loading import quiet_transformers  # loads torch, after what is told without it

        with quiet_transformers():
            return work()
    except VeilbaseError as exc:
        print(f"error: {exc}", file=sys.stderr)
    except OSError as exc:
        print(f"error: cannot read or write {str(exc.filename or out)[:200]}: {exc.strerror}", file=sys.stderr)
    return 2
