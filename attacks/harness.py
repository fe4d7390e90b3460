"""Drives a victim and a provider that records, as processes, and hands out the view and, apart from it, the truth.

Guarantees: the provider is `provider serve --tls --record` on loopback, the tenant uses the public SDK, and adversaries
get the recording alone. Every process is ended by its own handle. Nothing here listens to the network.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attacks.victim import Job, Run
from wire.errors import ConfigurationError

_START_S = 300
_VICTIM_S = 3000


def record(
    folder: Path, model: str, job: Job, masks: list[Run], limit: str = "4GiB", layers: str | None = None
) -> Path:
    """Runs the victim against a recording provider.

    Args:
        folder: for the recording, the provider's state and identities; must not hold a recording.
        model: as `provider serve --model` takes it.
        job: `url` and `runs` are filled in here.
        masks: what runs; `identity` is filled in here.
        limit: of the recording, such as 4GiB.
        layers: fnmatch patterns; None records all.

    Returns:
        The folder of the recording.

    Raises:
        ConfigurationError: the provider or the victim failed; its log is named.
    """
    seen = folder / "seen"
    options = ["--record", str(seen), "--record-limit", limit]
    if layers is not None:
        options += ["--record-layers", layers]
    runs = [run.model_copy(update={"identity": folder / f"identity-{run.label}"}) for run in masks]
    with _provider(folder, model, options, runs) as url:
        work = job.model_copy(update={"url": url, "runs": runs})
        (folder / "job.json").write_text(work.model_dump_json())
        log = folder / "victim.log"
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "attacks.victim", str(folder / "job.json")],
                stdout=output, stderr=output, timeout=_VICTIM_S, check=False,
            )  # fmt: skip
        if done.returncode:
            raise ConfigurationError(f"the victim failed: see {log}")
    return seen


@contextlib.contextmanager
def _provider(folder: Path, model: str, options: list[str], runs: list[Run]) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state"
    command = [sys.executable, "-m", "provider", "serve", "--tls", "--port", "0", "--model", model]
    with (folder / "provider.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--state", str(state), *options], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise ConfigurationError(f"the provider did not start: see {folder / 'provider.log'}")
        url = line.split()[1]
        for run in runs:
            enroll = [sys.executable, "-m", "provider", "enroll", run.label, "--out", str(run.identity)]
            subprocess.run(
                [*enroll, "--state", str(state), "--endpoint", url], check=True, stdout=subprocess.DEVNULL,
                timeout=_START_S,
            )  # fmt: skip
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
