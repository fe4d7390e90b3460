"""Measures batching and scheduling for many tenants, with loads from papers and with a flood of one tenant's requests.

The provider has one core to itself. Processes on another core replay the load: they are tenants without a model that
send rows as a model would, layer after layer, and pause in between. The provider itself measures latency, from a
request's arrival until its last product is computed (`veilbase_latency_seconds`). Policies take turns, round after
round, and the tables show medians. The command is `python -m benchmarks.batching [SCENARIO ...]`.

The rows that are sent come from one step of fine-tuning with lattice masks, which is recorded first. For layers of
other widths, such as those of Llama's block, the rows are uniform int32 numbers, as masked rows are.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.common import processor_s, provider

BLOCKS = "model.layers.[0-5].*"
"""The pattern of the layers that are served: six of the model's thirty blocks, so that a forward pass is 24
requests."""
LOAD_CORE = 1


@dataclass(frozen=True)
class _Load:
    """Describes the load of one tenant.

    Attributes:
        tenant: the tenant's name.
        rows: number of rows of each request.
        is_training: whether passes are forward and backward; otherwise they are forward only.
        think_ms: pause from a reply to the next request, in milliseconds.
        in_flight: number of passes that run at the same time.
        one_layer: whether every request is a forward request to the first layer group.
        spell_s: seconds for which the tenant sends before it pauses for the same time; 0 for no pauses.
    """

    tenant: str
    rows: int
    is_training: bool = False
    think_ms: float = 0.5
    in_flight: int = 1
    one_layer: bool = False
    spell_s: float = 0.0


# ---- recorded rows ---------------------------------------------------------------------------------------------------


@functools.cache
def recorded_rows() -> Path:
    """Returns the path of a safetensors file with the rows that a real tenant sends in one step. The file has one
    tensor for each width of rows, which is named by the width.

    The file is made at the first call and removed when the process exits.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(tempfile.mkdtemp(prefix="veilbase-rows-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    seen = folder / "seen"
    flags = ("--base-layers", BLOCKS, "--record", str(seen), "--record-limit", "1GiB")
    with provider(folder, *flags, tenants=("recorded",)) as (url, _):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.batching", "step", url, str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    by_width: dict[str, list[torch.Tensor]] = {}
    for line in (seen / "index.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["purpose"] == "product" and entry["file"]:
            rows = load_file(seen / entry["file"])["request"]
            by_width.setdefault(str(rows.shape[1]), []).append(rows)
    save_file({width: torch.cat(each) for width, each in by_width.items()}, folder / "rows.safetensors")
    return folder / "rows.safetensors"


def _take_step(url: str, folder: Path) -> None:
    """Takes one fine-tuning step as the tenant `recorded`, whose requests the provider records."""
    import tenant_sdk
    from benchmarks.finetune_step import step_of

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(url, identity=folder / "recorded", mask="lattice", cache=folder) as client:
        step_of(client.load_model())()


# ---- the load's process ----------------------------------------------------------------------------------------------


def replay(url: str, folder: Path, recording: Path, loads: Sequence[_Load]) -> None:
    """Sends the load until standard input ends.

    Each line on standard input is a number of seconds. For each line, the function waits for this time, and then prints
    as JSON how many rows got a reply in this time, by tenant. A tenant that has had no reply yet is left out.

    Args:
        url: the provider's gRPC URL.
        folder: the folder with the tenants' identities.
        recording: the file that `recorded_rows` made.
        loads: the tenants' loads.
    """
    import torch
    from safetensors.torch import load_file

    from wire.frame import Arithmetic, Call, Direction
    from wire.payload import RowsPayload
    from wire.transport.grpc_connection import GrpcConnection
    from wire.transport.identity import TlsIdentity

    os.sched_setaffinity(0, {LOAD_CORE})
    torch.set_num_threads(1)
    stop = threading.Event()
    counted: dict[str, int] = {}
    recorded = load_file(recording)

    def rows_of(num_rows: int, width: int) -> torch.Tensor:
        known = recorded.get(str(width))
        if known is None:
            return torch.randint(-(2**31), 2**31, (num_rows, width), dtype=torch.int32)
        first = int(torch.randint(len(known), ()))
        return known[(torch.arange(num_rows) + first) % len(known)]

    def connect(load: _Load) -> GrpcConnection:
        return GrpcConnection(url, TlsIdentity.read(folder / load.tenant))

    def work(load: _Load, connection: GrpcConnection) -> None:
        groups = connection.manifest().groups
        widths = {width for group in groups for width in (group.in_features, group.out_features)}
        rows = {width: rows_of(load.rows, width) for width in widths}
        calls = [(Call(g.id, Direction.FORWARD, Arithmetic.RING), g.in_features, g.out_features) for g in groups]
        if load.is_training:
            back = [
                (Call(g.id, Direction.BACKWARD, Arithmetic.RING), g.out_features, g.in_features) for g in groups[::-1]
            ]
            calls += back
        place = 0
        while not stop.is_set():
            if load.spell_s and int(time.monotonic() / load.spell_s) % 2:
                time.sleep(0.01)
                continue
            call, given, replied = calls[0 if load.one_layer else place % len(calls)]
            connection.submit(call, RowsPayload(rows[given]), replied).result()
            place += 1
            counted[load.tenant] = counted.get(load.tenant, 0) + load.rows
            time.sleep(load.think_ms / 1000)
        connection.close()

    for load in loads:
        connection = connect(load)
        for _ in range(load.in_flight):
            threading.Thread(target=work, args=(load, connection), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        before = dict(counted)
        time.sleep(float(line))
        print(json.dumps({name: counted[name] - before.get(name, 0) for name in counted}), flush=True)
    stop.set()


SECONDS, ROUNDS = 6.0, 3
PROVIDER_CORE = 0
TIGHT_MS = "0.2"
"""A latency target, in milliseconds, that is shorter than the time of one product. With this target the scheduler makes
decode requests wait as little as possible."""


@dataclass(frozen=True)
class _Found:
    """Holds the measurements of one run, or medians over several runs.

    Attributes:
        rows_per_s: rows with a reply per second, by tenant.
        latency_ms, p99_ms: mean and 99th percentile of latency inside the provider, by class of request; the percentile
            is interpolated in a histogram.
        batch: mean number of requests in a product; a request that is computed without being queued counts as a product
            of one request.
        waits_ms: mean wait before a request's first product, by layer group.
        cores: processor time divided by elapsed time, for `provider` and for `load`.
        busy: share of the elapsed time that products for a tenant took, by tenant.
    """

    rows_per_s: dict[str, float]
    latency_ms: dict[str, float]
    p99_ms: dict[str, float]
    batch: float
    waits_ms: dict[str, float]
    cores: dict[str, float]
    busy: dict[str, float]

    @property
    def total(self) -> float:
        """Returns the rows per second of all tenants."""
        return sum(self.rows_per_s.values())


# ---- one run ---------------------------------------------------------------------------------------------------------


def _measure(loads: Sequence[_Load], *options: str, seconds: float = SECONDS) -> _Found:
    """Starts a provider with these options, starts its load, and measures both for `seconds`, after a quarter of this
    time that is not measured."""
    from provider.operations.status import look

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tenants = tuple(load.tenant for load in loads)
        which = () if "--model" in options else ("--base-layers", BLOCKS)
        flags = ("--threads", "1", "--drain-s", "0", *which, *options)
        with provider(folder, *flags, tenants=tenants, core=PROVIDER_CORE) as (url, pid), ExitStack() as stack:
            processes = [stack.enter_context(_replayer(url, name, load)) for load in loads]
            for process in processes:
                if process.stdout is None or process.stdout.readline() != "ready\n":
                    raise SystemExit("the load did not start")
            _ask(processes, seconds / 4)
            pids = {"provider": [pid], "load": [process.pid for process in processes]}
            before, used = look(folder / "state"), {name: sum(map(processor_s, each)) for name, each in pids.items()}
            rows = _ask(processes, seconds)
            after = look(folder / "state")
            used = {name: sum(map(processor_s, each)) - used[name] for name, each in pids.items()}
    span = after.at_s - before.at_s

    def grown(sample: str, **labels: str) -> float:
        return after.get(sample, **labels) - before.get(sample, **labels)

    latency, p99 = {}, {}
    for kind in ("decode", "prefill", "finetune"):
        count = grown("veilbase_latency_seconds_count", kind=kind)
        if count:
            latency[kind] = 1000 * grown("veilbase_latency_seconds_sum", kind=kind) / count
            p99[kind] = 1000 * _quantile(0.99, _buckets(before, after, kind))
    inline = grown("veilbase_inline_requests_total")
    products = grown("veilbase_batch_requests_count")
    batch = (grown("veilbase_batch_requests_sum") + inline) / max(products + inline, 1)
    waits = {}
    for group in after.by_label("veilbase_group_requests_total", "group"):
        count = grown("veilbase_group_requests_total", group=group)
        waits[group] = 1000 * grown("veilbase_group_wait_seconds_total", group=group) / max(count, 1)
    rates = {name: count / span for name, count in rows.items()}
    busy = {load.tenant: grown("veilbase_compute_seconds_total", tenant=load.tenant) / span for load in loads}
    cores = {name: seconds / span for name, seconds in used.items()}
    return _Found(rates, latency, p99, batch, waits, cores, busy)


@contextlib.contextmanager
def _replayer(url: str, folder: str, load: _Load) -> Iterator[subprocess.Popen[str]]:
    """Starts the process of one tenant, and ends it after the `with` block. Each tenant has its own process, because
    threads of one process would wait for each other."""
    arguments = ["replay", url, folder, str(recorded_rows()), json.dumps([asdict(load)])]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.batching", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(processes: Sequence[subprocess.Popen[str]], seconds: float) -> dict[str, int]:
    """Returns the number of rows with a reply in the next `seconds`, by tenant."""
    counted: dict[str, int] = {}
    for process in processes:
        if process.stdin is not None:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
    for process in processes:
        counted |= json.loads(process.stdout.readline() if process.stdout else "{}")
    return counted


def _buckets(before: object, after: object, kind: str) -> list[tuple[float, float]]:
    name = "veilbase_latency_seconds_bucket"
    found = []
    for (sample, labels), value in after.values.items():  # type: ignore[attr-defined]
        named = dict(labels)
        if sample == name and named["kind"] == kind:
            found.append((float(named["le"]), value - before.values.get((sample, labels), 0.0)))  # type: ignore[attr-defined]
    return sorted(found)


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """Returns the latency that a given share of the requests does not exceed. It is interpolated inside a bucket, as
    Prometheus does."""
    wanted, lower, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(count - below, 1e-9)
        lower, below = bound, count
    return lower


def _medians(runs: Sequence[_Found]) -> _Found:
    """Returns the median of each measurement over several runs. A run without a measurement counts as 0."""

    def middle(dicts: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(one.get(name, 0.0) for one in dicts) for name in sorted(set().union(*dicts))}

    return _Found(
        middle([one.rows_per_s for one in runs]),
        middle([one.latency_ms for one in runs]),
        middle([one.p99_ms for one in runs]),
        statistics.median(one.batch for one in runs),
        middle([one.waits_ms for one in runs]),
        middle([one.cores for one in runs]),
        middle([one.busy for one in runs]),
    )


def _compare(cases: dict[str, tuple[Sequence[_Load], tuple[str, ...]]], seconds: float = SECONDS) -> dict[str, _Found]:
    """Returns the medians of `ROUNDS` runs of each case, by case; the cases take turns."""
    runs: dict[str, list[_Found]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (loads, options) in cases.items():
            runs[name].append(_measure(loads, *options, seconds=seconds))
    return {name: _medians(found) for name, found in runs.items()}


# ---- scenarios -------------------------------------------------------------------------------------------------------


def _eight_clients(slower: float, *options: str, seconds: float = SECONDS) -> dict[str, _Found]:
    """Measures three policies with eight clients, whose batches have 2 to 256 rows and whose pauses differ. `slower` is
    the factor by which all pauses are longer than in table 5."""
    thoughts = (0.2, 3.0, 0.5, 1.7, 0.9, 2.2, 0.3, 1.1)
    loads = [_Load(f"t{2 ** (n + 1)}", 2 ** (n + 1), think_ms=slower * think) for n, think in enumerate(thoughts)]
    return _compare(
        {
            "opportunistic": (loads, options),
            "none": (loads, (*options, "--batching", "none")),
            "lockstep": (loads, (*options, "--batching", "lockstep", "--max-wait-ms", "60000")),
        },
        seconds,
    )


def table5() -> dict[str, _Found]:
    """Repeats Symbiosis, table 5: eight inference clients with batches of 2 to 256 and different pauses."""
    return _eight_clients(1.0)


def _table5large() -> dict[str, _Found]:
    """Repeats Symbiosis, table 5, with a block of Llama-2-7B's shape, since the paper's models are that large."""
    with tempfile.TemporaryDirectory() as folder:
        _make_block(Path(folder))
        return _eight_clients(19.0, "--model", folder, seconds=20.0)


def _make_block(folder: Path) -> None:
    """Makes a checkpoint with one block of Llama-2-7B's shape and random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=1, num_attention_heads=32,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _table4() -> dict[str, _Found]:
    """Repeats Symbiosis, table 4: a small request beside a large one."""
    # both always request the same layer, so that they compete under any policy
    small, large = _Load("small", 1, one_layer=True), _Load("large", 512, think_ms=1.0, one_layer=True)
    lockstep = ("--batching", "lockstep", "--max-wait-ms", "60000")
    return _compare(
        {
            "small alone": ([small], ()),
            "both, lockstep": ([small, large], lockstep),
            "both, opportunistic": ([small, large], ()),
            "both, tight target": ([small, large], ("--slo-ms", TIGHT_MS)),
        }
    )


def flood() -> dict[str, _Found]:
    """Measures a tenant that decodes while another tenant sends as much as possible."""
    decode = _Load("decode", 1, think_ms=1.0)
    target = ("--slo-ms", TIGHT_MS)
    return _compare(
        {
            "alone": ([decode], target),
            "beside 512 rows, 8 at a time": ([decode, _Load("flood", 512, think_ms=0, in_flight=8)], target),
            "beside gradients": ([decode, _Load("flood", 512, is_training=True, think_ms=0, in_flight=4)], target),
            "beside 16 rows, 24 at a time": ([decode, _Load("flood", 16, think_ms=0, in_flight=24)], target),
            "beside gradients, no target": (
                [decode, _Load("flood", 512, is_training=True, think_ms=0, in_flight=4)],
                (),
            ),
        }
    )


def _figures22and23() -> dict[str, _Found]:
    """Repeats Symbiosis, figures 22 and 23: eight inference clients, then six inference clients and two that
    fine-tune."""
    inference = [_Load(f"i{number}", 1 + number % 4, think_ms=2.0 + 0.3 * number) for number in range(8)]
    tuning = [_Load(f"f{number}", 512, is_training=True, think_ms=1.0) for number in range(2)]
    target = ("--slo-ms", TIGHT_MS)
    return _compare({"8 inference": (inference, target), "6 inference + 2": (inference[:6] + tuning, target)})


def _flexllm() -> dict[str, _Found]:
    """Repeats a measurement of FlexLLM: how much throughput fine-tuning keeps beside inference with a target of 10 ms
    per request."""
    inference = [_Load(f"i{number}", 2, think_ms=3.0 + number) for number in range(3)]
    in_spells = [replace(load, spell_s=0.5) for load in inference]
    tuning = [_Load("tune", 512, is_training=True, think_ms=0, in_flight=3)]
    target = ("--slo-ms", "10")
    found = _compare(
        {
            "fine-tuning alone": (tuning, target),
            "inference alone": (inference, target),
            "both": (inference + tuning, target),
            "both, whole requests in turn (temporal sharing)": (inference + tuning, ("--batching", "none")),
            "inference every other half second, alone": (in_spells, target),
            "and with fine-tuning": (in_spells + tuning, target),
        }
    )
    peak = found["fine-tuning alone"].rows_per_s["tune"]
    for name, alone in (
        ("both", "inference alone"),
        ("both, whole requests in turn (temporal sharing)", "inference alone"),
        ("and with fine-tuning", "inference every other half second, alone"),
    ):
        kept = found[name].rows_per_s["tune"] / peak
        core, products = found[alone].cores["provider"], sum(found[alone].busy.values())
        print(
            f"{name}: fine-tuning keeps {kept:.2f} of its peak, {kept / (1 - core):.2f} of solo × (1 - busy) where "
            f"busy is the core's time for the inference alone ({core:.2f}), {kept / (1 - products):.2f} where it is "
            f"the products' alone ({products:.2f})"
        )
    return found


def windows() -> dict[str, _Found]:
    """Measures the latency of decode beside a tenant that fine-tunes on 2,048 tokens.

    The tenant sends all tokens in one request, or in requests of 256 tokens. The provider has a target of 10 ms for the
    latency and splits large requests to keep it, or has no target and splits no request.
    """
    inference = [_Load(f"i{number}", 2, think_ms=3.0 + number) for number in range(3)]
    tuning = {rows: [_Load("tune", rows, is_training=True, think_ms=0)] for rows in (2048, 256)}
    target, uncut = ("--slo-ms", "10"), ("--batching", "none")
    return _compare(
        {
            "decode alone": (inference, target),
            "beside 2,048 rows, target": (inference + tuning[2048], target),
            "beside windows of 256, target": (inference + tuning[256], target),
            "beside 2,048 rows, no request is cut": (inference + tuning[2048], uncut),
            "beside windows of 256, no request is cut": (inference + tuning[256], uncut),
        }
    )


def _plot_waits(found: dict[str, _Found], file: Path) -> None:
    """Draws the plot of Symbiosis, figure 7: the mean wait before each layer's product, by policy."""
    from benchmarks.common import pyplot

    plots = pyplot()
    figure, axes = plots.subplots(figsize=(6.4, 2.6), layout="constrained")
    for (name, one), style in zip(found.items(), ("o-", "s--", "^:"), strict=False):
        groups = sorted(one.waits_ms, key=int)
        waits = [one.waits_ms[group] for group in groups]
        axes.plot(range(len(groups)), waits, style, label=name, markersize=3, linewidth=1)
    axes.set(xlabel="layer group, in the order of the model", ylabel="wait, ms", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, ncols=3)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plots.close(figure)


SCENARIOS = {
    one.__name__: one for one in (table5, _table5large, _table4, flood, _figures22and23, _flexllm, windows)
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each scenario; with `--plot` also draws the waits of table 5."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching")
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=[])
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="table 5's waits by layer: figure 7")
    given = parser.parse_args(arguments)
    for name in given.scenarios or tuple(SCENARIOS):
        print(f"\n{(SCENARIOS[name].__doc__ or '').strip()}\n")
        print("| case | rows/s | by tenant | requests a product | latency ms, mean (p99) | cores, provider and load |")
        print("|---|---|---|---|---|---|")
        cases = SCENARIOS[name]()
        for case, found in cases.items():
            tenants = ", ".join(f"{tenant} {rate:.0f}" for tenant, rate in found.rows_per_s.items())
            times = ", ".join(
                f"{kind} {found.latency_ms[kind]:.2f} ({found.p99_ms[kind]:.1f})" for kind in found.latency_ms
            )
            cores = f"{found.cores['provider']:.2f}, {found.cores['load']:.2f}"
            print(f"| {case} | {found.total:.0f} | {tenants} | {found.batch:.2f} | {times} | {cores} |", flush=True)
        for case, found in cases.items():
            waits = found.waits_ms.values()
            low, high = min(waits), max(waits)
            print(f"{case}: mean wait by layer group {low:.2f} to {high:.2f} ms, {statistics.mean(waits):.2f} over all")
        if name == "table5" and given.plot is not None:
            _plot_waits(cases, given.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        _take_step(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["replay"]:
        replay(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), [_Load(**one) for one in json.loads(sys.argv[5])])
    else:
        main(sys.argv[1:])
