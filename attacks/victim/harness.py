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
from collections.abc import Iterator
from pathlib import Path

from attacks.victim.tenant import Job, Run, Site
from wire.errors import ConfigurationError

_START_S = 300
_VICTIM_S = 3000


def record(
    folder: Path, seen: Path, model: str, job: Job, masks: list[Run], limit: str = "4GiB", layers: str | None = None
) -> None:
    """Runs the victim with a provider that records, and keeps only the recording for adversaries.

    Args:
        folder: the folder for the provider's state, the identities, the job and the logs.
        seen: the folder for the recording; nothing that adversaries must not see is put there.
        model: the model, as `provider serve --model` takes it.
        job: what the victim does.
        masks: the runs to make; `identity` is filled in here.
        limit: the recording's size limit, such as 4GiB.
        layers: fnmatch patterns of the layers to record; None records all.

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
        try:
            victim.communicate(Site(url=url, runs=runs).model_dump_json(), timeout=_VICTIM_S)
        except subprocess.TimeoutExpired as exc:
            raise ConfigurationError(f"the victim was not done after {_VICTIM_S} s") from exc
        if victim.returncode:
            raise ConfigurationError(f"the victim failed: {_last_line(log)}")


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
                subprocess.Popen([*enroll, run.label, "--out", str(run.identity)], stdout=subprocess.DEVNULL)
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
