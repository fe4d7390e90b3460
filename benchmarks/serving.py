"""Measures the serving engine over mTLS loopback: tokens per second and per CPU second, and times to first tokens.

Provider and tenant are processes on one machine, with SmolLM2-135M as base. A run submits all of its requests at once,
each with a short question, and ends when each has 48 new tokens (or `--new-tokens`). With `lattice`, the masks of a run
are made before its clock starts, and none are made while it runs. The CPU seconds are those of both processes, and
those of `lattice` include the masks that were made for the run. Runs of all kinds take turns, and the figures are
medians over the rounds. The peer is transformers' `generate` with the same model in float32, on left-padded batches.

With `--whole`, runs over links of 1 and 20 ms follow, which need root, and the load times of adapters by tier.

`python -m benchmarks.serving kept` measures the time to the first token of a long prompt, with and without its
beginning in the engine's prefix cache. There is no mask. Prompts with a kept beginning and prompts that begin anew take
turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import adapters
from benchmarks.adapters import save, smollm2_shapes
from benchmarks.common import Worker, local_model, local_tokenizer, processor_s, provider, rss_mb
from benchmarks.link import ADDRESSES, Hosts, NoNamespaces

NEW_TOKENS = 48
SWITCHES = 50
"""The number of switches of adapters whose median times `--whole` prints, the same as `benchmarks.adapters`
makes."""
REQUESTS = (1, 8, 16, 32)
NUM_ADAPTERS = 16
LINKS = {1.0: 12, 20.0: 6}
"""The round-trip times in ms of the links of `--whole`, each with the number of new tokens of an answer over it. A
token of one request takes 120 round trips, so few tokens are enough."""
ADAPTERS = "adapters"
Figures = dict[str, float]
"""The figures of one run by name: elapsed seconds (`wall_s`), CPU seconds (`cpu_s`), the median seconds to the first
token (`first_s`), the seconds from the last request's first token to the end (`decode_s`), the memory of the tenant or
of the peer in MB (`rss_mb`), and, of a tenant, the memory of its provider in MB (`provider_mb`) and the CPU seconds for
making masks before the run (`prepare_cpu_s`)."""


def question(number: int) -> str:
    """Returns the text of a request's prompt; lengths differ by a few tokens."""
    return (
        f"Explain to a visitor how tides work, why they differ from day to day{', and why' * (number % 4)} ({number})."
    )


# ---- the processes that do the work ----------------------------------------------------------------------------------


def _serve_lines(work: Callable[[int, int, int], Figures]) -> None:
    """Makes one run for each line "requests adapters tokens" on standard input, and prints the figures of this run as a
    line of JSON."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(work(*map(int, line.split()))), flush=True)


def local() -> None:
    """Runs transformers' `generate` on a local float32 model, as a worker."""
    import tenant_sdk

    tenant_sdk.tune()
    import torch

    model, tokenizer = local_model(), local_tokenizer()

    def work(num_requests: int, num_adapters: int, num_new: int) -> Figures:
        chats = [[{"role": "user", "content": question(number)}] for number in range(num_requests)]
        batch, times = (
            tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            ),
            list[float](),
        )
        began, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            model.generate(
                **batch, max_new_tokens=num_new, do_sample=False, eos_token_id=None,
                pad_token_id=tokenizer.pad_token_id, logits_processor=[_Clock(times)],
            )  # fmt: skip
        return _figures(began, [times[0]] * num_requests, cpu_s=time.process_time() - cpu)

    _serve_lines(work)


class _Clock:
    """Records the time of each step of `generate`, as a logits processor that changes nothing."""

    def __init__(self, times: list[float]) -> None:
        self._times = times

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        self._times.append(time.perf_counter())
        return logits


def remote(url: str, folder: str, mask: str) -> None:
    """Runs one tenant with an engine, as a worker. Its CPU seconds include the masks that it makes before a run."""
    import tenant_sdk

    tenant_sdk.tune()
    import torch

    from tenant_sdk.serving.adapters import AdapterStore

    options = {"background": False} if mask == "lattice" else {}
    with (
        tenant_sdk.TenantClient(
            url, identity=Path(folder) / "bench", mask=mask, arithmetic="ring", mask_options=options, cache=folder
        ) as client,
        tenant_sdk.Engine(
            client,
            lambda model, wake: AdapterStore(
                model, Path(folder) / ADAPTERS, on_ready=wake, dtype=torch.bfloat16, preload=_names(NUM_ADAPTERS)
            ),
            max_running=max(REQUESTS),
        ) as engine,
    ):

        def work(num_requests: int, num_adapters: int, num_new: int) -> Figures:
            cpu = time.process_time()
            if mask == "lattice":
                client.prepare(num_requests * (longest + num_new))
            began, prepared = time.perf_counter(), time.process_time() - cpu
            names = _names(num_adapters) or [None]
            times: list[list[float]] = [[] for _ in range(num_requests)]
            answers = [
                engine.submit(
                    question(number), names[number % len(names)], num_new, eos_token_id=[],
                    logits_processor=[_Clock(own)],
                )
                for number, own in enumerate(times)
            ]  # fmt: skip
            for answer in answers:
                answer.result()
            figures = _figures(began, [own[0] for own in times], cpu_s=time.process_time() - cpu)
            return {**figures, "prepare_cpu_s": prepared}

        longest = max(engine.submit(question(number), max_new_tokens=1).num_prompt_tokens for number in range(2))
        _serve_lines(work)


def _figures(began: float, first_tokens: list[float], cpu_s: float) -> Figures:
    ended = time.perf_counter()
    return {
        "wall_s": ended - began,
        "cpu_s": cpu_s,
        "first_s": statistics.median(first_tokens) - began,
        "decode_s": ended - max(first_tokens),
        "rss_mb": rss_mb(os.getpid()),
    }


def _names(num_adapters: int) -> list[str]:
    return [f"a{number}" for number in range(num_adapters)]


# ---- the runs --------------------------------------------------------------------------------------------------------


class _Side(Worker):
    """Runs one side of the benchmark, the tenant's or the peer's, in a process of its own."""

    stderr = None

    def __init__(self, *arguments: str, provider_pid: int | None = None) -> None:
        """Starts the process.

        Args:
            arguments: the arguments of this module's command line.
            provider_pid: the process whose CPU seconds are added to those of a run; None without a provider.
        """
        self._provider_pid = provider_pid
        super().__init__("benchmarks.serving", *arguments)

    def answer(self, num_requests: int, num_adapters: int, num_new: int) -> Figures:
        """Returns the figures of one run, with `num_new` new tokens for each request."""
        before = self._provider_s()
        figures: Figures = json.loads(self.ask(f"{num_requests} {num_adapters} {num_new}"))
        if self._provider_pid is not None:
            figures["provider_mb"] = rss_mb(self._provider_pid)
        return {**figures, "cpu_s": figures["cpu_s"] + self._provider_s() - before}

    def _provider_s(self) -> float:
        return 0.0 if self._provider_pid is None else processor_s(self._provider_pid)


Kind = tuple[str, int, int]
"""Identifies a kind of run: the worker's name, the number of requests and the number of adapters."""


@contextlib.contextmanager
def workers(names: tuple[str, ...], round_trip_ms: float | None = None) -> Iterator[dict[str, _Side]]:
    """Starts a provider and the workers with these names: "local", or the name of a mask.

    Args:
        names: the names of the workers.
        round_trip_ms: the round-trip time of a link of 1 Gbit/s between provider and tenants (benchmarks/link.py); None
            for loopback. Hints are fetched before there is a delay.
    """
    import torch

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = smollm2_shapes()
        for seed, name in enumerate(_names(NUM_ADAPTERS)):
            save(model, folder / ADAPTERS / name, seed, torch.bfloat16)
        del model
        hosts = None if round_trip_ms is None else stack.enter_context(Hosts())
        with _inside(hosts, 0):
            url, pid = stack.enter_context(provider(folder, *(() if hosts is None else ("--host", ADDRESSES[0]))))
        with _inside(hosts, 1):
            made = {name: stack.enter_context(_worker(name, url, folder, pid)) for name in names}
        if hosts is not None and round_trip_ms is not None:
            hosts.set_round_trip(round_trip_ms)
        yield made


def _inside(hosts: Hosts | None, number: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if hosts is None else hosts.inside(number)


def _worker(name: str, url: str, folder: Path, provider_pid: int) -> _Side:
    if name == "local":
        return _Side("local")
    return _Side("remote", url, str(folder), name, provider_pid=provider_pid)


def measure(
    kinds: list[Kind], repeats: int, num_new: int = NEW_TOKENS, round_trip_ms: float | None = None
) -> dict[Kind, list[Figures]]:
    """Returns the figures of each round of each kind of run, after one round that is not counted."""
    made: dict[Kind, list[Figures]] = {kind: [] for kind in kinds}
    with workers(tuple(dict.fromkeys(name for name, _, _ in kinds)), round_trip_ms) as running:
        for repeat in range(repeats + 1):
            for name, num_requests, num_adapters in kinds:
                figures = running[name].answer(num_requests, num_adapters, num_new)
                if repeat:
                    made[name, num_requests, num_adapters].append(figures)
    return made


def median(figures: list[Figures], name: str) -> float:
    """Returns the median of one figure over the rounds."""
    return statistics.median(each[name] for each in figures)


def table(made: dict[Kind, list[Figures]], num_new: int) -> str:
    """Returns the figures as a table."""
    lines = [
        "| run | requests | adapters | tokens/s | first token, s | decode, tokens/s | tokens per CPU second "
        "| tenant's memory, MB | provider's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, num_requests, num_adapters), figures in made.items():
        num_tokens = num_requests * num_new
        decoded = num_requests * (num_new - 1)
        memory = f"{median(figures, 'provider_mb'):.0f}" if "provider_mb" in figures[0] else ""
        lines.append(
            f"| {name} | {num_requests} | {num_adapters or 'base'} | {num_tokens / median(figures, 'wall_s'):.1f} "
            f"| {median(figures, 'first_s'):.2f} | {decoded / median(figures, 'decode_s'):.1f} "
            f"| {num_tokens / median(figures, 'cpu_s'):.1f} | {median(figures, 'rss_mb'):.0f} | {memory} |"
        )
    return "\n".join(lines)


def ratio(made: dict[Kind, list[Figures]], one: Kind, other: Kind, figure: str) -> float:
    """Returns the rate of the runs `one` divided by that of the runs `other`, as the median over the rounds. The rate
    is tokens per second, with the seconds that `figure` names: `wall_s`, `cpu_s` or `decode_s`."""
    rate = [
        (one[1] / a[figure]) / (other[1] / b[figure]) for a, b in zip(made[one], made[other], strict=True)
    ]  # fmt: skip
    return statistics.median(rate)


def bars(made: dict[Kind, list[Figures]]) -> str:
    """Returns a table of the ratios that have a bar (a target), with the bars. If the runs of a ratio were not made, it
    is left out."""
    wanted = [
        ("tokens per CPU second, 8 requests to 1", ("lattice", 8, 0), ("lattice", 1, 0), "cpu_s", 3.0),
        ("tokens per CPU second, 16 requests to 1", ("lattice", 16, 0), ("lattice", 1, 0), "cpu_s", 4.5),
        ("tokens/s, 16 adapters to 1", ("lattice", 16, 16), ("lattice", 16, 1), "wall_s", 0.8),
        ("decode, lattice to off, 8 requests", ("lattice", 8, 0), ("off", 8, 0), "decode_s", 0.85),
        ("decode, lattice to off, 16 requests", ("lattice", 16, 0), ("off", 16, 0), "decode_s", 0.85),
    ]
    lines = ["| ratio | measured | bar |", "|---|---|---|"]
    for name, one, other, figure, bar in wanted:
        if one in made and other in made:
            lines.append(f"| {name} | {ratio(made, one, other, figure):.2f} | {bar} |")
    return "\n".join(lines)


def _over_link(round_trip_ms: float, num_new: int) -> str:
    """Returns the table of one round of runs over a link, for each number of requests, or why there is none."""
    kinds = [(name, count, 0) for count in REQUESTS for name in ("off", "lattice")]
    try:
        return table(measure(kinds, 1, num_new, round_trip_ms), num_new)
    except NoNamespaces as exc:
        return f"not run here: {exc}"


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds that are counted")
    parser.add_argument("--only", nargs="*", help="runs such as lattice:8:0 (worker, requests, adapters)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens of each answer")
    parser.add_argument("--round-trip-ms", type=float, help="of a link between provider and tenant; needs root")
    parser.add_argument(
        "--busy-poll-ms", type=float, default=2.0, help="the longest busy polling at both ends (docs/benchmarks.md)"
    )
    parser.add_argument("--whole", action="store_true", help="also links of 1 and 20 ms, and load times by tier")
    given, _ = parser.parse_known_args()
    os.environ["VEILBASE_BUSY_POLL_MS"] = os.environ["VEILBASE_PROVIDER_BUSY_POLL_MS"] = str(given.busy_poll_ms)
    kinds = [
        *[(name, count, 0) for count in REQUESTS for name in ("local", "off", "lattice")],
        *[
            (name, count, adapters)
            for count in REQUESTS
            for adapters in (1, NUM_ADAPTERS)
            if count > 1 or adapters == 1  # One request has one adapter.
            for name in ("off", "lattice")
        ],
    ]
    if given.only:
        kinds = [
            (name, int(count), int(adapters)) for name, count, adapters in (each.split(":") for each in given.only)
        ]
    made = measure(kinds, given.repeats, given.new_tokens, given.round_trip_ms)
    print(table(made, given.new_tokens), bars(made), sep="\n\n", flush=True)
    if given.whole:
        for round_trip_ms, num_new in LINKS.items():
            print(f"\nOver a link with a round trip of {round_trip_ms:g} ms, {num_new} new tokens:\n", flush=True)
            print(_over_link(round_trip_ms, num_new), flush=True)
        print()
        adapters.report(SWITCHES)


KEPT_ROUNDS = 5
DOCUMENT = "The tide gauge at the old harbour was read every hour, and each reading was written into a ledger. " * 20


def _first_token_s(engine: Any, text: str, caller: str) -> tuple[float, Any]:
    """Returns the seconds from a request to its first token, and the answer."""
    began, times = time.perf_counter(), list[float]()

    def clock(_: Any, logits: Any) -> Any:
        times.append(time.perf_counter())
        return logits

    answer = engine.submit(text, max_new_tokens=1, logits_processor=[clock], caller=caller)
    answer.result()
    return times[0] - began, answer


def _compare_kept() -> None:
    """Measures both kinds of prompts and prints the result as a table."""
    import tenant_sdk

    tenant_sdk.tune()
    with (
        tempfile.TemporaryDirectory() as folder,
        provider(Path(folder)) as (url, _),
        tenant_sdk.TenantClient(
            url, identity=Path(folder) / "bench", mask="off", arithmetic="ring", cache=folder, progress=False
        ) as client,
        tenant_sdk.Engine(client, prefix_bytes=1 << 28) as engine,
    ):
        _first_token_s(engine, DOCUMENT, "kept")
        kept, fresh, reused = [], [], 0
        for number in range(KEPT_ROUNDS):
            question = f"{DOCUMENT} What was written on day {number}?"
            seconds, answer = _first_token_s(engine, question, "kept")
            kept.append(seconds)
            reused = answer.num_reused_tokens
            fresh.append(_first_token_s(engine, question, f"new {number}")[0])
    print("| prompt, tokens | of these kept | first token, s | without | ratio |\n|---|---|---|---|---|")
    ratio = statistics.median(a / b for a, b in zip(kept, fresh, strict=True))
    print(
        f"| {answer.num_prompt_tokens} | {reused} | {statistics.median(kept):.2f} | {statistics.median(fresh):.2f} "
        f"| {ratio:.2f} |"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["local"]:
        local()
    elif sys.argv[1:2] == ["remote"]:
        remote(*sys.argv[2:])
    elif sys.argv[1:2] == ["kept"]:
        argparse.ArgumentParser("python -m benchmarks.serving kept", description=_compare_kept.__doc__).parse_args(
            sys.argv[2:]
        )
        _compare_kept()
    else:
        main()
