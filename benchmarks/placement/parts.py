"""Holds the parts of the benchmark. Each part repeats some figures or a table of the Symbiosis paper, and returns rows
of results that can be saved as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import Worker, processor_s
from benchmarks.link import ADDRESSES, Hosts, NoNamespaces
from benchmarks.placement.model import LORAS
from benchmarks.placement.sides import Served, Site, available_mb, in_process, measure, on_core, served, start
from benchmarks.placement.worker import Job

FEW, MANY = (1, 2, 3, 4), (5, 6)
"""The numbers of clients for Figures 10 to 12. Up to four, both sides' processes are up at the same time and take
turns; with more they would take more than 20 GB, so one side is measured after the other."""
MASKED, PLACED = (1, 2), (1, 2)
"""The numbers of clients with `lattice`, and at each place of Figures 13 to 17."""
OTHER_HOST, ROUND_TRIP_MS = "other host", 1.0
LEAST_MB = 6000
"""The memory in MB that must be free before a further process is started. A process takes at most 3,000 MB; the rest is
for other work of the machine."""
Rows = list[dict[str, Any]]
SAY = print
"""The function that tells the user how far a part is."""


def _names(most: int) -> tuple[str, ...]:
    return tuple(f"tenant{number}" for number in range(most))


# ---- Figures 10 to 12 ----------------------------------------------------------------------------------------------


def _few_clients(site: Site) -> Rows:
    """Measures 1 to 4 clients, in turns with as many local processes (Figures 10 to 12)."""
    rows: Rows = []
    with ExitStack() as stack:
        add, pids = _tenants(stack, site, max(FEW), "off")
        tenants: list[Worker] = []
        locals_: list[Worker] = []
        for number in FEW:
            tenants += [add(index) for index in range(len(tenants), number)]
            locals_ += [start(stack, Job(str(site.model))) for _ in range(len(locals_), number)]
            rows.append(_said({"side": "provider", "mask": "off"} | measure(tenants, site.num_steps, pids)))
            rows.append(_said({"side": "local"} | measure(locals_, site.num_steps)))
    return rows


def _masked_clients(site: Site) -> Rows:
    """Measures 1 and 2 clients with `lattice`, whose masks are made in the step, and after them as many local
    processes."""
    with ExitStack() as stack:
        add, pids = _tenants(stack, site, max(MASKED), "lattice")
        rows = _grown(site, {"side": "provider", "mask": "lattice"}, MASKED, add, pids)
    with ExitStack() as stack:
        rows += _grown(site, {"side": "local"}, MASKED, lambda _: start(stack, Job(str(site.model))))
    return rows


def _many_clients(site: Site) -> Rows:
    """Measures 5 and 6 clients, and after them as many local processes."""
    rows: Rows = []
    with ExitStack() as stack:
        add, pids = _tenants(stack, site, max(MANY), "off")
        rows += _grown(site, {"side": "provider", "mask": "off"}, MANY, add, pids)
    with ExitStack() as stack:
        rows += _grown(site, {"side": "local"}, MANY, lambda _: start(stack, Job(str(site.model))))
    return rows


def _mapped_locals(site: Site) -> Rows:
    """Measures 1 to 6 local processes that share the mapped checkpoint, as transformers loads it on a CPU."""
    with ExitStack() as stack:
        job = Job(str(site.model), is_mapped=True)
        return _grown(site, {"side": "local, mapped"}, (*FEW, *MANY), lambda _: start(stack, job))


def _grown(
    site: Site, known: dict[str, Any], numbers: Sequence[int], add: Callable[[int], Worker], pids: Sequence[int] = ()
) -> Rows:
    rows: Rows = []
    workers: list[Worker] = []
    for number in numbers:
        for index in range(len(workers), number):
            if available_mb() < LEAST_MB:
                SAY(f"{known['side']}: the machine has no room for process {index + 1}")
                return rows
            workers.append(add(index))
        rows.append(_said(known | measure(workers, site.num_steps, pids)))
    return rows


def _tenants(stack: ExitStack, site: Site, most: int, mask: str) -> tuple[Callable[[int], Worker], Sequence[int]]:
    """Starts a provider for up to `most` tenants. Returns a function that starts the tenant of a number, and the ids of
    the provider's processes."""
    if site.transport == "inproc":
        return lambda _: start(stack, in_process(site, mask=mask)), ()
    one = stack.enter_context(served(site, _names(most)))
    return lambda index: start(stack, one.job(site, f"tenant{index}", site.transport, mask=mask)), one.pids


def _said(row: dict[str, Any]) -> dict[str, Any]:
    SAY(json.dumps(row), flush=True)
    return row


# ---- Table 2 -------------------------------------------------------------------------------------------------------


def _loras(site: Site) -> Rows:
    """Measures one client with each adapter of `LORAS`, and after it a local process that trains the same adapter
    (Table 2)."""
    rows: Rows = []
    with served(site, _names(1)) as one:
        for name, lora in LORAS.items():
            adapter = {"rank": lora.rank, "targets": lora.targets}
            job = one.job(site, "tenant0", site.transport, **adapter)
            with ExitStack() as stack:
                tenant, local = start(stack, job), start(stack, Job(str(site.model), **adapter))
                row = {"side": "provider", "lora": name} | measure([tenant], site.num_steps, one.pids)
                rows.append(_said(row | json.loads(Path(job.report or "").read_text())))
                rows.append(_said({"side": "local", "lora": name} | measure([local], site.num_steps)))
    return rows


# ---- Figures 13 to 17 ----------------------------------------------------------------------------------------------


def places(site: Site) -> Rows:
    """Measures one and two clients in each place, with a provider of one process and with one of two shards (Figures 13
    to 17), and one and two local processes.

    On the provider's own host, clients reach it by its Unix socket or by TCP. The other host is a
    network namespace behind a link of 1 Gbit/s with a round trip of 1 ms. It is left out if namespaces cannot be made.
    """
    rows: Rows = []
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts())
            hosts.set_round_trip(ROUND_TRIP_MS)
        except NoNamespaces as exc:
            SAY(f"no other host here: {exc}")
            hosts = None
        for shards in (1, 2):
            inside = contextlib.nullcontext() if hosts is None else hosts.inside(0)
            host = "127.0.0.1" if hosts is None else ADDRESSES[0]
            options = () if shards == 1 else ("--shards", str(shards))
            with inside, served(site, _names(max(PLACED)), *options, host=host) as one:
                rows += _at_each_place(site, one, hosts, shards)
    with ExitStack() as stack:
        rows += _grown(site, {"side": "local"}, PLACED, lambda _: start(stack, Job(str(site.model))))
    return rows


def _at_each_place(site: Site, one: Served, hosts: Hosts | None, shards: int) -> Rows:
    rows: Rows = []
    ways = {"same host, ipc": "ipc", "same host, TCP": "tcp"}
    if hosts is not None:
        ways[OTHER_HOST] = "tcp"
    for place, transport in ways.items():
        known: dict[str, Any] = {"side": "provider", "place": place, "shards": shards}
        if hosts is not None and place == OTHER_HOST:
            known["round_trip_ms"] = hosts.measured_round_trip_ms(urlsplit(one.url).port or 0)
        with ExitStack() as stack:
            workers: list[Worker] = []
            for name in _names(max(PLACED)):
                with hosts.inside(1) if hosts is not None and place == OTHER_HOST else contextlib.nullcontext():
                    workers.append(start(stack, one.job(site, name, transport)))
                rows.append(_said(known | measure(workers, site.num_steps, one.pids)))
    return rows


# ---- Figure 18 -----------------------------------------------------------------------------------------------------


def _slow_device(site: Site) -> Rows:
    """Measures one client and one local process, each with and without a busy loop on its core, and the client with a
    busy loop on the provider's core (Figure 18). Client and provider have a core each. In the rows, `loop_share` is the
    share of the core that the loop had."""
    rows: Rows = []
    tenant_core, provider_core = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        one = stack.enter_context(served(site, _names(1), "--threads", "1", core=provider_core))
        tenant = start(stack, on_core(one.job(site, "tenant0", site.transport), tenant_core))
        local = start(stack, on_core(Job(str(site.model)), tenant_core))
        cases = (("none", None), ("client", tenant_core), ("provider", provider_core), ("local", tenant_core))
        for slow, core in cases:
            with _busy_loop(core) as share:
                row = {"side": "local" if slow == "local" else "provider", "slow": slow}
                found = (
                    measure([local], site.num_steps) if slow == "local" else measure([tenant], site.num_steps, one.pids)
                )
                rows.append(_said(row | found | {"loop_share": share()}))
        rows.append(_said({"side": "local", "slow": "none", "loop_share": 0.0} | measure([local], site.num_steps)))
    return rows


@contextlib.contextmanager
def _busy_loop(core: int | None) -> Iterator[Callable[[], float]]:
    """Runs a loop on one core inside the context (None runs nothing). Yields a function that returns the share of the
    core that the loop has had so far."""
    if core is None:
        yield lambda: 0.0
        return
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loop])
    began, before = time.perf_counter(), processor_s(process.pid)
    try:
        yield lambda: (processor_s(process.pid) - before) / (time.perf_counter() - began)
    finally:
        process.kill()
        process.wait()


PARTS: dict[str, Callable[[Site], Rows]] = {
    "figure10": _few_clients,
    "figure10-many": _many_clients,
    "figure10-mapped": _mapped_locals,
    "figure10-lattice": _masked_clients,
    "table2": _loras,
    "figure13": places,
    "figure18": _slow_device,
}
"""The parts, by the names that `--only` takes. Each takes less than eight minutes with the model of 1B. `figure10` is
Figures 10, 11 and 12 (memory, latency and throughput of the same runs), and `figure13` is Figures 13 to 17."""
