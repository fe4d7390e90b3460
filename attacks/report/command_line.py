"""Implements the command line of extract_lora and recover_prompts, from the victim or a recording to the report.

The exit status is 0 if the report was written and holds no alarm, 1 if it holds an alarm, and 2 for a request that
cannot be carried out. There is an alarm if an adversary raises an exception, loses on its control, is better than
chance allows against a private mask, or (with a LoRA victim) does not win against a mask that is not private. With
`--draws`, and on the full profile, there is also one if chance does not explain the random numbers in the victim's
masks.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.controls import Control, ControlResult
from attacks.report.exit_status import exit_status
from attacks.report.options import check_options, wanted_adversaries
from attacks.report.stages import say
from attacks.victim.names import TINY_MODELS
from attacks.victim.tenant import KINDS
from runtime.stopping import at_once, told_when_stopped
from wire.errors import ConfigurationError

MASKS = "off,gaussian-pool,lattice,lattice-rounded"
_LOOK_S = 0.5
_ENDING_S = 10.0
"""The seconds that a process has to end by itself after it has sent its results, and again after SIGTERM."""
_JUDGED_ROWS = 16
"""The largest number of private questions on which a stolen adapter is tested."""

OTHER_PROGRAMS = {
    "attacks.active": "a provider that lies: wrong products, hints and gradients, with and without verification",
    "attacks.game": "a distinguisher game: which of two prompts was sent, thousands of times over",
    "attacks.weakenings": "weaknesses put into the lattice mask at its shipped size, and honest ones: who notices",
    "attacks.overflow": "a provider that makes numbers overflow, and watches where the tenant's calls end",
    "attacks.growth": "time of lattice reduction at toy dimensions, beside the published estimates",
}
"""Programs for attacks that need more than a recording, or no recording. `--list` names these programs, but
`--adversaries` does not accept them."""

if TYPE_CHECKING:
    from attacks.report.evaluate import Case
    from attacks.report.table import Result
    from attacks.seen.adversary import Adversary
    from attacks.seen.view import View


def main(program: str, description: str, default: str | None, arguments: Sequence[str] | None) -> int:
    """Parses the command line, runs it, and returns the exit status that the module's docstring describes.

    Args:
        program: the command's name.
        description: one line for --help.
        default: the names of the adversaries that run if the command line names none; None runs those of `quick` on a
            tiny model, and all on other models and on recordings.
        arguments: the command line's arguments; None takes those of the process.

    Raises:
        SystemExit: the arguments are not valid (status 2), only help was requested (0), or Ctrl-C (130) or SIGTERM
            came (143).
    """
    parser = make_parser(program, description)
    options = parser.parse_args(arguments)
    if options.view is not None and options.peft != "lora":
        parser.error("--view takes a recording as it is: --peft is for a victim")
    if options.view is not None and options.draws:
        parser.error("--view has no victim to look into: leave --draws out")
    if options.view is None and options.tenant is not None:
        parser.error("--tenant is for --view")
    if options.list:
        for name, summary in summaries(default).items():
            print(f"{name:22} {summary}")
        print("\nprograms of their own:")
        for module, summary in OTHER_PROGRAMS.items():
            print(f"python -m {module:19} {summary}")
        return 0
    names = default if options.adversaries is None else options.adversaries
    with told_when_stopped(program):  # a signal raises an exception, which ends the started processes, too
        return exit_status(program, options.out, lambda: _run(program, options, names), lambda: _check(options, names))


def summaries(names: str | None) -> dict[str, str]:
    """Returns the summary of each adversary of the catalogue, or of those with the given comma-separated names, by its
    name. They are read from the source files, since importing the catalogue loads torch."""
    root = Path(__file__).parents[1]
    made = {}
    for path in sorted((root / "adversaries").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Adversary("):
                name, summary = map(ast.literal_eval, getattr(node.value, "args", [])[:2])
                made[ast.unparse(node.targets[0])] = name, summary
    catalogue = ast.parse((root / "report" / "catalogue.py").read_text(encoding="utf-8"))
    (listed,) = (node for node in catalogue.body if ast.unparse(node).startswith("CATALOGUE:"))
    named = [each.id for each in ast.walk(listed) if isinstance(each, ast.Name)]
    found = dict(made[each] for each in named if each in made)
    return found if names is None else {each: found[each] for each in names.split(",")}


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a program's options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog="Exit status: 0 done; 1 a control does not win, what is not private holds, or a private mask shows more "
        "than chance does; 2 it cannot be done.",
    )
    parser.add_argument(
        "--model", help="tiny-llama, tiny-gpt2, smollm2-135m or a Hugging Face folder; by default what --profile says"
    )
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="full is smollm2-135m")
    parser.add_argument(
        "--masks",
        help=f"comma-separated, {MASKS} by default; with --view the one that was used, if you know",
    )
    parser.add_argument("--adversaries", help="comma-separated names of --list")
    parser.add_argument("--peft", choices=tuple(KINDS), default="lora", help="what the victim trains; tiny models only")
    parser.add_argument(
        "--draws", action="store_true",
        help="also look, inside the victim, at what its lattice masks are made of; the full profile always does",
    )  # fmt: skip
    parser.add_argument("--adapter", type=Path, help="PEFT folder to attack in place of one that is trained")
    parser.add_argument("--view", type=Path, help="a recording of `provider serve --record` in place of a victim")
    parser.add_argument("--tenant", help="with --view: whose traffic; by default that of all")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of the report")
    parser.add_argument("--list", action="store_true", help="names the adversaries, and the programs beside this one")
    return parser


def _model(options: argparse.Namespace) -> str:
    if options.model is not None:
        return str(options.model)
    return "smollm2-135m" if options.profile == "full" else "tiny-llama"


def _check(options: argparse.Namespace, names: str | None) -> None:
    """Raises ConfigurationError if the command line names what there is not. Loads no torch."""
    if names is not None:
        wanted_adversaries(names, summaries(None))
    check_options(options, _model(options), MASKS)


def _run(program: str, options: argparse.Namespace, names: str | None) -> int:
    with at_once(program):
        from attacks.report.catalogue import adversaries, quick

    if names is None and options.view is None and _model(options) in TINY_MODELS:
        names = quick()
    chosen = adversaries(names)
    with _controls_beside(names) as results_of_controls:
        return attack_and_report(options, chosen, results_of_controls)


@contextlib.contextmanager
def _controls_beside(names: str | None) -> Iterator[Connection]:
    """Runs the adversaries' positive controls in a separate process, which is ended when the block ends. Yields the
    connection from which the list of their results can be received."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_controls, args=(theirs, names), daemon=True)
    with _without_ctrl_c():
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(_ENDING_S if sys.exc_info()[0] is None else 0)  # after a signal an exception would be printed
        process.terminate()
        process.join(_ENDING_S)
        process.kill()  # the exception that the signal raised may have been lost
        process.join()


def _run_controls(results: Connection, names: str | None) -> None:
    import torch

    from attacks.report.catalogue import controls

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit removes temporary folders, too
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bar of a library
        results.send([_checked(control) for control in controls(names)])


def _checked(control: Control) -> ControlResult:
    """Runs a control and returns its result. A control that raises an exception counts as lost."""
    try:
        return control()
    except Exception as exc:  # noqa: BLE001 - whatever it is, the report says so
        name = control.__module__.rsplit(".", 1)[-1]
        return ControlResult(name, f"raised {type(exc).__name__}", "ran", 0.0, 1.0, smaller_wins=False)


def attack_and_report(options: argparse.Namespace, chosen: Sequence[Adversary], results_of_controls: Connection) -> int:
    """Attacks every case, writes the report, and returns the program's exit code."""
    import torch

    from attacks.report import plots, table, verdict
    from attacks.truth.judge import kind_of

    shutil.rmtree(options.out / "stolen", ignore_errors=True)  # left by an earlier run
    model = _model(options)
    is_tiny = model in TINY_MODELS
    if is_tiny:
        torch.set_num_threads(1)  # with several threads, batches of small systems took 70 times as long
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as recording:
        if options.view is not None:
            cases, notes = _recorded(options)
        else:
            cases, notes = make_cases(Path(scratch), Path(recording), model, options)
        notes += _rounded(cases)
        say(f"attacks {len(cases)} runs with {len(chosen)} adversaries")
        results = attack_all(cases, chosen, options.out, len(os.sched_getaffinity(0)) if is_tiny else 1)
    say(f"waits for the controls of {len(chosen)} adversaries, which run beside this")
    try:
        checks: list[ControlResult] = results_of_controls.recv()
    except EOFError as exc:
        raise ConfigurationError("the process of the positive controls ended without a word: out of memory?") from exc
    alarms = [
        *verdict.weakened(results),
        *(said for case in cases for said in verdict.drawn(case.label, case.draws)),
        *(f"control of {one.adversary} does not win" for one in checks if not one.wins),
    ]
    if options.peft == "lora" and options.view is None:
        truths = [case.truth for case in cases if case.truth is not None]
        kinds = {kind_of(name) for truth in truths for name, delta in truth.deltas.items() if bool(delta.any())}
        alarms += verdict.standing(results, is_tiny, kinds, {one.name for one in chosen})
    notes += [f"ALARM: {alarm}" for alarm in alarms] or ["no alarm: what is private shows no more than chance does"]
    said = verdict.in_three_lines(results, len(checks), sum(not one.wins for one in checks), len(alarms))
    files = [*table.write(options.out, results, checks, notes, said), *plots.draw(options.out, results)]
    print("\n".join([*table.bullets(said), *table.lines(results, checks, notes)]))
    print(f"\nwritten: {', '.join(map(str, files))}; adapters and prompts that were stolen: {options.out / 'stolen'}")
    sys.stdout.flush()
    for alarm in alarms:
        print(f"ALARM: {alarm}", file=sys.stderr)
    print("\n" + "\n".join(said))  # once more, where a reader of a long table ends
    return 1 if alarms else 0


def attack_all(cases: Sequence[Case], chosen: Sequence[Adversary], out: Path, num_processes: int) -> Sequence[Result]:
    """Attacks every case and returns the results in the order of the cases. If `num_processes` is at least 2, the work
    is divided among that many processes.

    Raises:
        ConfigurationError: one of these processes ended early, or the recording cannot be read.
    """
    from attacks.report.evaluate import attack, parts

    whole = [(case, part) for case in range(len(cases)) for part in range(len(parts(chosen)))]
    if num_processes < 2:
        return [result for case, part in whole for result in attack(cases[case], parts(chosen)[part], chosen, out, say)]
    order = sorted(whole, key=lambda one: one[1])  # the adversaries that take longest come first
    context = multiprocessing.get_context("fork")  # a forked process has views and models already
    others = {process.pid for process in multiprocessing.active_children()}
    with _sigterm_waits():  # the forked processes inherit this
        pool = context.Pool(num_processes, _set_work, (cases, chosen, out))
    with pool:
        started = {process.pid for process in multiprocessing.active_children()} - others
        waiting = pool.map_async(_attack_part, order, chunksize=1)
        while not waiting.ready():
            waiting.wait(_LOOK_S)
            if not started <= {process.pid for process in multiprocessing.active_children()}:
                raise ConfigurationError("a process that attacks ended without a word: out of memory?")
        found = dict(zip(order, waiting.get(), strict=True))
    return [result for one in whole for result in found[one]]


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Starts processes that ignore Ctrl-C, which a terminal sends to all: this process ends them, and says so once. A
    mask would not do, since multiprocessing takes SIGINT off it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Blocks SIGTERM for this thread within the context. A signal that comes meanwhile is delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_work: list[tuple[Sequence[Case], Sequence[Adversary], Path]] = []


def _set_work(*work: Any) -> None:
    # On SIGTERM this process ends at once. If the signal raised an exception instead, the exception could be lost, and
    # the pool would wait for this process. Until here the signal is held back, since the pool ends a process that has
    # not come this far when the others have done all the work. The process also gets a process group of its own, so
    # that only the pool ends it. A signal to the old group could end it while it holds a lock for which the pool waits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _work[:] = [work]


def _attack_part(place: tuple[int, int]) -> list[Result]:
    from attacks.report.evaluate import attack, parts

    cases, chosen, out = _work[0]
    return attack(cases[place[0]], parts(chosen)[place[1]], chosen, out, say)


def _checked_view(view: View, label: str, num_prompts: int) -> View:
    """Returns the view of one run if the recording is complete. Missing traffic could make a mask look unbroken.

    Raises:
        ConfigurationError: messages have no tensors, or prompts were not recorded.
    """
    from attacks.seen.forward_passes import places

    whole = view.with_tensors()
    found = len({number for number, _ in places(whole).values()})
    if len(whole.messages) < len(view.messages) or found != num_prompts:
        raise ConfigurationError(
            f"the recording of {label} is not whole ({len(whole.messages)} of {len(view.messages)} messages, "
            f"{found} of {num_prompts} prompts): is there room on the disk?"
        )
    return whole


def _recorded(options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """Makes a case for each tenant of a recording, or only for the tenant that --tenant names. Returns the cases, and
    notes for the report. Claims are judged only if the tenant's adapter is given.

    Raises:
        ConfigurationError: the model does not fit the recording, or it cannot be read.
    """
    from attacks.report import verdict
    from attacks.report.evaluate import Case
    from attacks.seen.view import open_view
    from attacks.truth.secrets import Truth
    from attacks.victim.models import load_public

    say(f"reads the recording {options.view}")
    view = open_view(options.view)
    tenants = view.tenants if options.tenant is None else (options.tenant,)
    notes = [f"recording of {view.manifest.model_id}, {len(view.messages)} messages"]
    if not view.is_ended:
        notes.append("the recording was not ended: it goes on, was cut off, or its disk was full")
    loaded, public = load_public(options.model, view.manifest)
    truth = None if options.adapter is None else Truth(loaded, public, view.manifest, options.adapter)
    cases = []
    for name in tenants:
        seen = view.of_tenant(name)
        if seen.is_truncated:
            notes.append(
                f"{name}: tensors of the first {len(seen.with_tensors().messages)} of {len(seen.messages)} messages, "
                "since the recording ran into its size limit; metadata of all"
            )
        cases.append(Case(name, options.masks or verdict.UNKNOWN, seen, public, truth, [], None, tenant=name))
    return cases, notes


def _rounded(cases: Sequence[Case]) -> list[str]:
    """Returns a note for each case with rounded rows: which adversaries leave these out."""
    from wire.ring.widths import FULL_BITS

    notes = []
    for case in cases:
        bits = {message.bits for message in case.view.products() if message.arithmetic == "ring"} - {FULL_BITS}
        if bits:
            notes.append(
                f"{case.label}: rows were rounded to {', '.join(map(str, sorted(bits)))} bits; no-error, tiny-error "
                "and shared-error solve the lowest of 32 bits, and leave these rows out"
            )
    return notes


def make_cases(scratch: Path, recording: Path, model: str, options: argparse.Namespace) -> tuple[list[Case], list[str]]:
    """Records a victim's traffic, and makes a case for each run, which is a mask in one arithmetic. Returns the cases,
    and notes for the report.

    Raises:
        ConfigurationError: the options are not valid, or the recording is not complete.
    """
    from attacks.report.evaluate import Case
    from attacks.seen.view import open_view
    from attacks.truth.secrets import Truth, read_batches
    from attacks.truth.stolen_adapter import PrivateTask
    from attacks.victim import draws, harness, profiles
    from attacks.victim.models import load_public

    runs = profiles.runs(options.masks or MASKS)
    profile = profiles.choose(scratch, model, options.adapter, options.peft)
    job = profile.job.model_copy(update={"watched": True}) if options.draws else profile.job
    seen = recording / "seen"  # no truth in this folder
    say(f"records the traffic of a victim, {model}, in {len(runs)} runs: {', '.join(run.label for run in runs)}")
    harness.record(scratch / "run", seen, profile.model, job, runs, profile.limit, profile.layers, say)
    say("reads the recording, and the truth for the judge")
    view = open_view(seen)
    if not view.is_ended:
        raise ConfigurationError("the recording was not ended: is there room on the disk?")
    notes = [f"profile {profile.name}, model {model}, {len(view.messages)} messages recorded"]
    loaded, public = load_public(profile.model, view.manifest)
    truth = Truth(loaded, public, view.manifest, profile.job.adapter or profile.job.truth / "adapter")
    rows = profile.job.rows[:_JUDGED_ROWS]
    task = PrivateTask(truth.base, truth.adapted, public.tokenizer, rows) if rows else None
    cases = []
    for run in runs:
        sent = json.loads((profile.job.truth / f"{run.label}.json").read_text())
        trained = read_batches(profile.job.truth / f"{run.label}-batches.json")
        seen_here = _checked_view(view.of_tenant(run.label), run.label, len(sent))
        drawn = []
        if job.watched and run.mask == "lattice":
            drawn = draws.checks_from_json(json.loads((job.truth / f"{run.label}-draws.json").read_text()))
            notes.append(f"{run.label}: {draws.total_tests(drawn)} tests of what its masks are made of, from inside")
        cases.append(Case(run.label, run.shown or run.mask, seen_here, public, truth, sent, task, trained, draws=drawn))
    return cases, notes
