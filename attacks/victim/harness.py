"""Runs a victim and a recording provider as processes, and keeps the view apart from the truth.

The provider is `provider serve --tls --record` on loopback, the tenant uses the public SDK, and adversaries get the
recording alone. Every process is ended by its own handle. No process accepts connections from other machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks.victim.names import STAGE
from attacks.victim.tenant import Job, Run, Site
from wire.errors import ConfigurationError

_START_S = 300
_LOOK_S, _STILL_S = 1.0, 15.0
"""The seconds between two looks at how far the victim is, and those after which a stage that goes on is said again."""
_VICTIM_S = 3000


def record(
    folder: Path, seen: Path, model: str, job: Job, masks: list[Run], limit: str = "4GiB", layers: str | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> None:  # fmt: skip
    """Runs the victim with a provider that records, and keeps only the recording for adversaries.

    Args:
        folder: the folder for the provider's state, the identities, the job and the logs.
        seen: the folder for the recording; nothing that adversaries must not see is put there.
        model: the model, as `provider serve --model` takes it.
        job: what the victim does.
        masks: the runs to make; `identity` is filled in here.
        limit: the recording's size limit, such as 4GiB.
        layers: fnmatch patterns of the layers to record; None records all.
        say: called with a line for each stage of the victim's work, and now and then within one.

    Raises:
        ConfigurationError: the provider did not start or could not enrol a tenant, or the victim failed or took longer
            than _VICTIM_S seconds. For a start or a victim that failed, the text has the last line of the log.
    """
    options = ["--record", str(seen), "--record-limit", limit]
    if layers is not None:
        options += ["--record-layers", layers]
    runs = [run.model_copy(update={"identity": folder / f"identity-{run.label}"}) for run in masks]
    environment = dict(os.environ)
    if job.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.num_threads)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(job.model_dump_json())
    log = folder / "victim.log"
    with (  # meanwhile the victim trains
        _victim(folder / "job.json", log, environment) as victim,
        _provider(folder, model, options, runs, environment) as url,
    ):
        _wait(victim, Site(url=url, runs=runs), Stages(log, say))
        if victim.returncode:
            raise ConfigurationError(f"the victim failed: {_last_line(log)}")


def _wait(victim: subprocess.Popen[str], site: Site, stages: Stages) -> None:
    """Tells the victim where the provider is, and waits for its end; meanwhile says how far it is."""
    until = time.monotonic() + _VICTIM_S
    told: str | None = site.model_dump_json()
    while time.monotonic() < until:
        try:
            victim.communicate(told, timeout=_LOOK_S)
            return
        except subprocess.TimeoutExpired:
            told = None  # what was given goes on being written
            stages.look()
    raise ConfigurationError(f"the victim was not done after {_VICTIM_S} s")


class Stages:
    """Says which stages a victim has written into its log, and from time to time that one goes on."""

    def __init__(self, log: Path, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._say, self._clock = log, say, clock
        self._began_s = self._said_s = clock()
        self._num_said, self._last = 0, "begins"

    def look(self) -> None:
        """Says what is new."""
        lines = self._log.read_text(errors="replace").splitlines()
        stages = [line.removeprefix(STAGE) for line in lines if line.startswith(STAGE)]
        now_s = self._clock()
        for stage in stages[self._num_said :]:
            self._last = stage
            self._say(f"victim: {stage}")
            self._began_s = self._said_s = now_s
        self._num_said = len(stages)
        if now_s - self._said_s >= _STILL_S:
            self._said_s = now_s
            self._say(f"victim: {self._last}, for {now_s - self._began_s:.0f} s so far")


@contextlib.contextmanager
def _victim(job: Path, log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Starts a victim, which trains its adapter before it needs the provider. The victim is killed when the block ends,
    even by an exception."""
    command = [sys.executable, "-W", "ignore", "-m", "attacks.victim.tenant", str(job)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, env=environment
        )
    try:
        yield process
    finally:
        process.kill()  # does nothing to a process that has ended
        process.communicate()


@contextlib.contextmanager
def _provider(
    folder: Path, model: str, options: list[str], runs: list[Run], environment: dict[str, str]
) -> Iterator[str]:
    state = folder / "state"
    command = [sys.executable, "-m", "provider", "serve", "--tls", "--port", "0", "--model", model]
    with (folder / "provider.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--state", str(state), *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    too_late = threading.Timer(_START_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline() if process.stdout else ""
        too_late.cancel()
        if not line.startswith("ready "):
            raise ConfigurationError(f"the provider did not start: {_last_line(folder / 'provider.log')}")
        url = line.split()[1]
        enroll = [sys.executable, "-m", "provider", "enroll", "--state", str(state), "--endpoint", url]
        with contextlib.ExitStack() as ending:
            enrolling = [
                # in groups of their own: Ctrl-C in a terminal is said by this process alone
                subprocess.Popen(
                    [*enroll, run.label, "--out", str(run.identity)], stdout=subprocess.DEVNULL, process_group=0
                )
                for run in runs
            ]
            for one in enrolling:
                ending.callback(one.wait)
                ending.callback(one.kill)  # does nothing to a process that has ended
            for run, one in zip(runs, enrolling, strict=True):
                if _failed(one):
                    raise ConfigurationError(f"the provider could not enrol {run.label}")
        yield url
    finally:
        too_late.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failed(enrolling: subprocess.Popen[bytes]) -> bool:
    try:
        return bool(enrolling.wait(timeout=_START_S))
    except subprocess.TimeoutExpired:
        return True


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
