"""Starts the processes of both sides, lets them take steps at the same time, and measures time and memory.

A process's memory is its peak during the steps. This is computed from its present PSS, in which a page that n processes
share counts as 1/n: to it is added the amount by which resident memory was higher at its peak than it is now. The sum
over processes is an upper bound, since not all processes have their peaks at the same moment.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, child_pids, own_mb, processor_s, provider, pss_mb_of
from benchmarks.placement.worker import NUM_TOKENS, Job

TRANSPORTS = ("tcp", "ipc", "inproc")
"""The ways from a tenant to its provider: TLS on the tensor port, a Unix socket on the same host, or the provider
inside the tenant's process."""

_INSTRUCTIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8")


@dataclass(frozen=True)
class Site:
    """Holds what all parts of the benchmark share.

    Attributes:
        model: the folder of the model.
        scratch: a folder for states, identities and caches.
        transport: one of TRANSPORTS.
        num_steps: the number of measured steps of each client, after one that is not measured.
    """

    model: Path
    scratch: Path
    transport: str
    num_steps: int = 3


@dataclass(frozen=True)
class Served:
    """Describes a running provider: its URL, the folder of its socket and of its tenants' identities, and the ids of
    its processes."""

    url: str
    folder: Path
    pids: tuple[int, ...]

    def job(self, site: Site, name: str, transport: str, **changes: Any) -> Job:
        """Returns the job of the tenant `name`, which reaches this provider by `transport`."""
        url = self.url if transport == "tcp" else f"ipc:{self.folder / 'ipc'}"
        # Each tenant keeps hints of its own: hints belong to the seed that their tenant drew.
        cache = str(self.folder / "cache" / name)
        return Job(
            str(site.model), url, str(self.folder / name), cache=cache, report=cache + ".json", **changes,
        )  # fmt: skip


@contextlib.contextmanager
def served(
    site: Site, names: Sequence[str], *options: str, core: int | None = None, host: str = "127.0.0.1"
) -> Iterator[Served]:
    """Runs a provider of the site's model, with tenants of the given names, inside the context.

    Args:
        site: the benchmark's site.
        names: the names of tenants to enrol.
        options: options of `provider serve`.
        core: the only core that the provider may use; None allows all.
        host: the address to serve on.
    """
    folder = site.scratch / f"provider-{time.monotonic_ns()}"
    (folder / "cache").mkdir(parents=True)
    fixed = ("--model", str(site.model), "--host", host, "--ipc", str(folder / "ipc"))
    with provider(folder, *fixed, *options, tenants=tuple(names), core=core) as (url, pid):
        yield Served(url, folder, (pid, *child_pids(pid)))


def start(stack: ExitStack, job: Job) -> Worker:
    """Starts the process of a job, which ends with the stack; waits until it can take steps."""
    return stack.enter_context(Worker("benchmarks.placement.worker", job.as_argument()))


def _start_all(stack: ExitStack, jobs: Sequence[Job]) -> list[Worker]:
    """Starts the processes of several jobs, one after the other, so that loading does not take more memory than
    steps."""
    return [start(stack, job) for job in jobs]


def in_process(site: Site, **changes: Any) -> Job:
    """Returns the job of a tenant with the provider in its own process."""
    return Job(str(site.model), f"inproc:{site.model}", cache=str(site.scratch / "cache"), **changes)


def measure(workers: Sequence[Worker], num_steps: int, provider_pids: Sequence[int] = ()) -> dict[str, Any]:
    """Lets all workers take steps at the same time, and returns their figures.

    Args:
        workers: the clients of one side.
        num_steps: the number of measured steps of each client, after one that is not measured.
        provider_pids: the ids of the provider's processes; none for local processes.

    Returns:
        The number of clients, the median seconds of a step, the tokens per second of all clients together, the memory
        in MB of the clients together, what of it is their own (without mapped files, such as hints) and of the
        provider, the processor seconds that a step takes its client and the provider, and the share of the machine's
        processor time that other processes had meanwhile.
    """
    pids = [one.pid for one in workers]
    with ThreadPoolExecutor(len(workers)) as threads:
        _steps_of_all(threads, workers, 1)
        for pid in (*pids, *provider_pids):
            _forget_peak(pid)
        before, others = [_used_s(group) for group in (pids, provider_pids)], _used_by_all_s()
        began = time.perf_counter()
        latencies = _steps_of_all(threads, workers, num_steps)
        seconds = time.perf_counter() - began
    clients_s, provider_s = (_used_s(each) - one for each, one in zip((pids, provider_pids), before, strict=True))
    others = _used_by_all_s() - others - clients_s - provider_s
    return {
        "clients": len(workers),
        "step_s": statistics.median(latencies),
        "tokens_per_s": len(workers) * num_steps * NUM_TOKENS / seconds,
        "clients_mb": sum(_peak_mb(pid, pss_mb_of) for pid in pids),
        "clients_own_mb": sum(_peak_mb(pid, own_mb) for pid in pids),
        "provider_mb": sum(_peak_mb(pid, pss_mb_of) for pid in provider_pids),
        "clients_cpu_s": clients_s / len(latencies),
        "provider_cpu_s": provider_s / len(latencies),
        "others_share": max(0.0, others / seconds / (os.cpu_count() or 1)),
    }


def _used_s(pids: Sequence[int]) -> float:
    return sum(processor_s(pid) for pid in pids)


def _used_by_all_s() -> float:
    """Returns the processor time that all processes of this machine have used, in seconds (proc(5), stat)."""
    user, nice, system, _, _, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _steps_of_all(threads: ThreadPoolExecutor, workers: Sequence[Worker], num_steps: int) -> list[float]:
    """Returns the seconds of each step of each worker. A worker takes its steps without waiting for the others."""

    def steps_of(worker: Worker) -> list[float]:
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            worker.run()
            times.append(time.perf_counter() - began)
        return times

    return [one for each in threads.map(steps_of, workers) for one in each]


def _forget_peak(pid: int) -> None:
    """Sets the highest resident memory of a process to the present one (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_mb(pid: int, memory_mb: Callable[[str], float]) -> float:
    """Returns the present memory of a process, by its smaps_rollup, and how much more was resident at the peak."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    highest, present = (int(status[name].split()[0]) / 1000 for name in ("VmHWM", "VmRSS"))
    return memory_mb(Path(f"/proc/{pid}/smaps_rollup").read_text()) + max(0.0, highest - present)


def available_mb() -> float:
    """Returns the memory in MB that new processes may take (proc(5), meminfo)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 1000


def on_core(job: Job, core: int | None) -> Job:
    """Returns a job whose process may use one core only."""
    return replace(job, core=core)


def machine() -> dict[str, Any]:
    """Returns the processor's name, the number of cores that this process may use, and which of the instruction sets
    that matter for products the processor has: AVX2, AVX-512, VNNI, bfloat16, AMX."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    known = [name for name in _INSTRUCTIONS if name in flags]
    name = f"{fields.get('model name', 'unknown')} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return {"processor": name, "cores": len(os.sched_getaffinity(0)), "instructions": known}
