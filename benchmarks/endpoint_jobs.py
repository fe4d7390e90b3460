"""Measures the time between two tokens of a streamed answer, alone and while a fine-tuning job runs.

A provider and `tenant serve` run as processes of their own, with mTLS between them, and this process is the HTTP
client. `python -m benchmarks.endpoint_jobs [--masks off,lattice] [--rounds 3]` prints a table: the median and the 95th
percentile of the gaps between two pieces of an answer, alone and beside the job, the ratio of the 95th percentiles, and
the job's steps per minute. The rounds alternate, so that a drift of the machine's speed affects both alike: the job is
cancelled before each round without it and resumed before each round with it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import provider

if TYPE_CHECKING:
    import openai

MODEL = "smollm2-135m"
NUM_TOKENS = 64
"""The length of a streamed answer, in tokens."""
STREAMS = 2
"""The number of answers of a round, one after another."""
PROMPT = "Tell a long story about a lighthouse and its keeper."
ROW = {"prompt": "Who keeps the lighthouse? ", "completion": "Mara keeps it, as her mother did. " * 6}
"""A training row of about 60 tokens."""
JOB = {"max_steps": 100_000, "batch_size": 4, "rank": 16}
END_OF_TEXT = {"0": -100, "2": -100}
"""Biases, by token id, against the tokens with which SmolLM2 ends an answer, so that each answer has its full
length."""


@dataclass
class _Gaps:
    """Holds the measurements with one mask.

    Attributes:
        alone, beside: the seconds between two pieces of an answer, without a job and while the job runs.
        num_steps: the number of steps that the job made while answers were streamed beside it.
        seconds: the time of these answers, in seconds.
    """

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def serving(folder: Path, mask: str) -> Iterator[openai.OpenAI]:
    """Starts a provider and `tenant serve`, and yields a client of the endpoint of `tenant serve`.

    Raises:
        SystemExit: `tenant serve` did not start; the error holds the end of its log.
    """
    import openai

    (folder / "adapters").mkdir()
    with provider(folder) as _, (folder / "serve.log").open("w") as log:
        command = [
            sys.executable, "-m", "tenant_sdk", "serve", "--identity", str(folder / "bench"), "--mask", mask,
            "--verify", MODEL, "--adapters", str(folder / "adapters"), "--port", "0",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            lines = [line.split() for line in _until_ready(process)]
            if not lines or lines[-1][0] != "ready":
                raise SystemExit((folder / "serve.log").read_text()[-2000:])
            yield openai.OpenAI(base_url=lines[-1][1], api_key=lines[-2][1], max_retries=0, timeout=300)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def _until_ready(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yields the lines that `tenant serve` prints, up to the one that says it is ready."""
    for line in process.stdout or ():
        if line.strip():
            yield line
        if line.startswith("ready "):
            return


def _stream_gaps(ai: openai.OpenAI) -> list[float]:
    """Streams one answer, and returns the seconds between its pieces, which are the chunks that have text."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    chunks = ai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=NUM_TOKENS, temperature=0, stream=True, logit_bias=END_OF_TEXT
    )  # fmt: skip
    times = [time.perf_counter() for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _measured(ai: openai.OpenAI, rounds: int) -> _Gaps:
    """Streams `STREAMS` answers without a job and `STREAMS` answers beside a job, in each of `rounds` rounds, and
    returns the measurements."""
    found = _Gaps()
    rows = "\n".join([json.dumps(ROW)] * 64).encode()
    file = ai.files.create(file=("rows.jsonl", rows), purpose="fine-tune")
    job = ai.fine_tuning.jobs.create(
        model=MODEL, training_file=file.id, suffix="beside", extra_body={"hyperparameters": JOB}
    )
    _wait_for_steps(ai, job.id, 6)  # past the first checkpoint, so that the job can go on from there
    _stream_gaps(ai)
    for _ in range(rounds):
        ai.fine_tuning.jobs.cancel(job.id)
        _wait_until_idle(ai)
        found.alone += [gap for _ in range(STREAMS) for gap in _stream_gaps(ai)]
        ai.fine_tuning.jobs.resume(job.id)
        before = _wait_for_steps(ai, job.id, 1)
        began = time.monotonic()
        found.beside += [gap for _ in range(STREAMS) for gap in _stream_gaps(ai)]
        found.seconds += time.monotonic() - began
        found.num_steps += _num_steps(ai, job.id) - before
    ai.fine_tuning.jobs.cancel(job.id)
    return found


def _num_steps(ai: openai.OpenAI, job_id: str) -> int:
    curve: Any = ai.get(f"/fine_tuning/jobs/{job_id}/losses", cast_to=object)
    return int(curve["num_steps"])


def _wait_for_steps(ai: openai.OpenAI, job_id: str, num_steps: int) -> int:
    """Waits until a job has made `num_steps` further steps, and returns the number of all its steps. Raises SystemExit
    if the job ends before that."""
    pause, before = threading.Event(), _num_steps(ai, job_id)
    while (now := _num_steps(ai, job_id)) < before + num_steps:
        status = ai.fine_tuning.jobs.retrieve(job_id).status
        if status not in ("queued", "running"):
            raise SystemExit(f"the job has {status}")
        pause.wait(0.1)
    return now


def _wait_until_idle(ai: openai.OpenAI) -> None:
    """Gives a cancelled job time to end its last pass, by streaming one answer that is not measured. This function does
    not check that the job has ended."""
    _stream_gaps(ai)


def _quantile(values: list[float], share: float) -> float:
    """Returns the quantile of some values, at least two, for a share from 0.01 to 0.99."""
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def line(mask: str, gaps: _Gaps) -> str:
    """Returns the table's line for one mask."""
    alone, beside = _quantile(gaps.alone, 0.95), _quantile(gaps.beside, 0.95)
    medians = [1000 * statistics.median(each) for each in (gaps.alone, gaps.beside)]
    return (
        f"| {mask} | {medians[0]:.0f} / {1000 * alone:.0f} | {medians[1]:.0f} / {1000 * beside:.0f} | "
        f"{beside / alone:.2f} | {60 * gaps.num_steps / gaps.seconds:.0f} |"
    )


def main() -> int:
    """Measures each mask and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--masks", default="off,lattice")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| mask | alone: median / p95 ms | beside a job: median / p95 ms | p95 ratio | steps a minute |")
    print("|---|---|---|---|---|")
    for mask in given.masks.split(","):
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), mask) as ai:
            print(line(mask, _measured(ai, given.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
