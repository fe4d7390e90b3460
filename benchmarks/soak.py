"""Runs twenty tenants, some of which die suddenly, and checks that nothing is lost, wrong or left over.

Each process runs five tenants, which send requests of all classes. The rows are slices of known rows, and every reply
is compared bit by bit with the known product. Now and then a tenant closes its connection while requests are pending,
or a whole process is killed. `python -m benchmarks.soak [SECONDS]` returns exit status 1 if anything was wrong.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import provider
from wire.errors import DeadlineExceeded, QuotaExceeded, Unavailable
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import SeededRows
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

BLOCKS = "model.layers.[0-1].*"
NUM_PROCESSES, TENANTS_EACH = 4, 5
KILL_EVERY_S = 15.0
ROWS = 640
_SEED = bytes(range(32))
_SETTLE_S = 60.0
"""The most seconds, after the end of the tenants, until nothing of them is left at the provider."""


@dataclass
class _Soak:
    """Holds the results of a run.

    Attributes:
        answered: number of correct replies.
        refused: number of requests that were refused because of a quota.
        wrong: number of wrong replies.
        lost: number of requests that got neither a reply nor a refusal; a tenant that got stuck or failed counts as
            one.
        deaths: number of processes killed.
        rss_mb, threads, files: the provider's resident memory in MB, its threads and its open files, once a second.
        left: (open streams, queued requests) at the provider after the end.
    """

    answered: int = 0
    refused: int = 0
    wrong: int = 0
    lost: int = 0
    deaths: int = 0
    rss_mb: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    left: tuple[int, int] = (0, 0)

    @property
    def growth_mb(self) -> float:
        """Returns the median memory of the last quarter of the run minus that of the second quarter, in MB."""
        quarter = max(1, len(self.rss_mb) // 4)
        return statistics.median(self.rss_mb[-quarter:]) - statistics.median(self.rss_mb[quarter : 2 * quarter])

    @property
    def is_good(self) -> bool:
        """Returns whether there were replies, nothing was lost, wrong or left over, memory grew by less than 64 MB, and
        the number of threads grew by at most 8 and that of open files by at most 16."""
        quarter = max(1, len(self.threads) // 4)
        steady = max(self.threads[-quarter:]) <= max(self.threads[: 2 * quarter]) + 8
        steady &= max(self.files[-quarter:]) <= max(self.files[: 2 * quarter]) + 16
        return not (self.wrong or self.lost or any(self.left)) and steady and self.growth_mb < 64 and self.answered > 0


# ---- one process of tenants ------------------------------------------------------------------------------------------


class _Counts:
    """Counts the outcomes of requests. Several threads may use one object."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), dict.fromkeys(("answered", "refused", "wrong", "lost"), 0)

    def add(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def say(self, num_lost: int) -> None:
        """Prints the counts as a line of JSON.

        Args:
            num_lost: the number of threads that are stuck or dead; each counts as one lost request.
        """
        with self._lock:
            print(json.dumps({**self._counts, "lost": self._counts["lost"] + num_lost}), flush=True)


def _request(rng: random.Random, known: Mapping[str, torch.Tensor], group: int) -> tuple[Call, Payload, torch.Tensor]:
    """Returns (call, payload, right reply) of a random request, which asks for a known product or a known hint."""
    direction = rng.choice(list(Direction))
    size = rng.choice((1, 1, 1, 4, 16, 100, 512))
    first = rng.randrange(ROWS - size + 1)
    place = slice(first, first + size)
    key = f"{group}.{int(direction)}"
    if rng.random() < 0.1:
        seed = SeedPayload(SeededRows(_SEED, first, size), known[f"{key}.rows"].shape[1])
        return Call(group, direction, Arithmetic.RING, Purpose.HINT), seed, known[f"{key}.hint"][place]
    rows, replies = RowsPayload(known[f"{key}.rows"][place]), known[f"{key}.replies"][place]
    return Call(group, direction, Arithmetic.RING), rows, replies


def _work(
    connect: Callable[[], GrpcConnection],
    known: Mapping[str, torch.Tensor],
    rng: random.Random,
    counts: _Counts,
    stop: threading.Event,
) -> None:
    """Runs one tenant until `stop` is set; now and then it closes its connection while requests are pending."""
    connection = connect()
    num_groups = len(connection.manifest().groups)
    while not stop.is_set():
        asked = [_request(rng, known, rng.randrange(num_groups)) for _ in range(rng.choice((1, 1, 1, 5)))]
        sent = [(connection.submit(call, payload, want.shape[1]), want) for call, payload, want in asked]
        if rng.random() < 0.01:
            connection.close()
            connection = connect()
            continue
        for pending, want in sent:
            try:
                counts.add("answered" if torch.equal(pending.result(), want) else "wrong")
            except QuotaExceeded:
                counts.add("refused")
            except (Unavailable, DeadlineExceeded):  # a request that the provider has lost fails at its deadline
                counts.add("lost")
        time.sleep(rng.random() * 0.01)
    connection.close()


def tenants(url: str, folder: Path, names: list[str], seed: int) -> None:
    """Runs the tenants `names`, each in a thread, until standard input ends; prints the counts twice a second."""
    torch.set_num_threads(1)
    known = load_file(folder / "known.safetensors")
    stop, counts = threading.Event(), _Counts()
    threads = []
    for number, name in enumerate(names):
        identity, rng = TlsIdentity.read(folder / name), random.Random(seed * 1000 + number)
        connect = functools.partial(GrpcConnection, url, identity)
        threads.append(threading.Thread(target=_work, args=(connect, known, rng, counts, stop)))
    for thread in threads:
        thread.start()

    def end_with_input() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end_with_input, daemon=True).start()
    while not stop.wait(0.5):
        counts.say(sum(not thread.is_alive() for thread in threads))
    for thread in threads:
        thread.join(60)
    counts.say(sum(thread.is_alive() for thread in threads))


class _Tenants:
    """Runs `tenants` in a process of its own, and keeps the last counts that the process printed."""

    def __init__(self, url: str, folder: Path, names: list[str], seed: int) -> None:
        """Starts a process that runs the function `tenants` with these arguments."""
        self.names = names
        self.said: dict[str, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.soak", "tenants", url, str(folder), *names, str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.endswith("}\n"):
                self.said = json.loads(line)

    def kill(self) -> None:
        """Kills the process, so that it cannot close its connections."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def end(self) -> None:
        """Ends the process normally; a process that does not end in time is killed and counts as a lost request."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()
            self.said["lost"] = self.said.get("lost", 0) + 1
        self._reader.join(10)


# ---- the run ---------------------------------------------------------------------------------------------------------


def _known_replies(folder: Path, model: str, blocks: str) -> None:
    """Writes random rows, their product and a hint, for every group and direction, to known.safetensors."""
    from provider.model.load import load, resolve
    from provider.model.served_model import ServedModel
    from provider.model.weights import serve_model

    served = serve_model(load(resolve(model)), patterns=blocks)
    model, tensors = ServedModel(served), {}
    for group in model.manifest().groups:
        for direction in Direction:
            width = group.in_features if direction is Direction.FORWARD else group.out_features
            rows = torch.randint(-(2**31), 2**31, (ROWS, width), dtype=torch.int32)
            key = f"{group.id}.{int(direction)}"
            tensors[f"{key}.rows"] = rows
            tensors[f"{key}.replies"] = model.compute(Call(group.id, direction, Arithmetic.RING), rows)
            hint = Call(group.id, direction, Arithmetic.RING, Purpose.HINT)
            tensors[f"{key}.hint"] = model.compute(hint, SeededRows(_SEED, 0, ROWS))
    save_file(tensors, folder / "known.safetensors")


def soak(
    seconds: float, model: str, blocks: str, kill_every_s: float = KILL_EVERY_S, least_answers: int = 1
) -> _Soak:  # fmt: skip
    """Starts a provider, runs the tenants against it, and returns the results.

    Every `kill_every_s` seconds, one process of tenants is killed and replaced by a new one. The run ends after
    `seconds`, but not before one process was killed and each has got `least_answers` answers, however long that takes.

    Args:
        seconds: the least length of the run.
        model: the provider's model.
        blocks: the pattern of the layers that are served.
        kill_every_s: the seconds from one death to the next.
        least_answers: how many right answers a process has before it may be killed, and before the run may end.
    """
    from provider.operations.status import look

    found, rng = _Soak(), random.Random(1)
    names = [[f"t{process}-{number}" for number in range(TENANTS_EACH)] for process in range(NUM_PROCESSES)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _known_replies(folder, model, blocks)
        flags = ("--model", model, "--base-layers", blocks, "--slo-ms", "5")
        everybody = tuple(name for group in names for name in group)
        url, pid = stack.enter_context(provider(folder, *flags, tenants=everybody))
        watched = psutil.Process(pid)
        running = [_Tenants(url, folder, group, seed) for seed, group in enumerate(names)]
        ended: list[_Tenants] = []
        end_at, kill_at = time.monotonic() + seconds, time.monotonic() + kill_every_s
        is_over = False
        while not is_over:
            time.sleep(1.0)
            found.rss_mb.append(watched.memory_info().rss / 1e6)
            found.threads.append(watched.num_threads())
            found.files.append(watched.num_fds())
            busy = [place for place, one in enumerate(running) if one.said.get("answered", 0) >= least_answers]
            is_late = time.monotonic() >= end_at
            is_over = is_late and found.deaths > 0 and len(busy) == NUM_PROCESSES
            if time.monotonic() >= kill_at and busy and not (is_late and found.deaths):
                place = rng.choice(busy)
                running[place].kill()
                ended.append(running[place])
                found.deaths += 1
                running[place] = _Tenants(url, folder, names[place], 100 + found.deaths)
                kill_at = time.monotonic() + kill_every_s
        for one in running:
            one.end()
        for one in (*ended, *running):
            for what, number in one.said.items():
                setattr(found, what, getattr(found, what) + number)
        give_up_at = time.monotonic() + _SETTLE_S
        while True:
            now = look(folder / "state")
            found.left = int(now.get("veilbase_streams")), int(now.get("veilbase_queue_depth"))
            if not any(found.left) or time.monotonic() >= give_up_at:
                return found
            time.sleep(0.2)


def main() -> int:
    """Runs the benchmark, prints its results and returns the exit status."""
    found = soak(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0, "smollm2-135m", BLOCKS)
    print(
        f"answered {found.answered}, refused {found.refused}, wrong {found.wrong}, lost {found.lost}, "
        f"processes killed {found.deaths}; provider: {found.rss_mb[0]:.0f} MB at first, "
        f"growth {found.growth_mb:+.1f} MB, threads at most {max(found.threads)}, files {max(found.files)}; "
        f"left: {found.left[0]} streams, {found.left[1]} requests: {'good' if found.is_good else 'BAD'}"
    )
    return 0 if found.is_good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["tenants"]:
        tenants(sys.argv[2], Path(sys.argv[3]), sys.argv[4:-1], int(sys.argv[-1]))
    else:
        sys.exit(main())
