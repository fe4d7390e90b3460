"""Shows the metrics of a running provider as a table, for the command `provider status`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from provider.operations.metrics import REGISTRY_LEFT
from provider.operations.monitor import read_metrics
from provider.schedule.ticket import RequestClass
from wire.errors import ConfigurationError


@dataclass
class Snapshot:
    """Holds the metrics that were read at one time.

    Attributes:
        at_s: the time of reading, in seconds of `time.monotonic`.
        values: the value of each sample, by the sample's name and labels.
    """

    at_s: float
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> float:
        """Returns the value of the sample with this name and these labels, or 0 if there is no such sample."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def by_tenant(self, name: str) -> dict[str, float]:
        """Returns, for each tenant's name, the sum of a metric over all other labels."""
        return self.by_label(name, "tenant")

    def by_label(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Returns, for each value of `label`, the sum of a metric over the samples that also have the labels in
        `others`."""
        sums: dict[str, float] = {}
        for (sample, labels), value in self.values.items():
            one = dict(labels).get(label)
            if sample == name and one is not None and others.items() <= dict(labels).items():
                sums[one] = sums.get(one, 0.0) + value
        return sums

    def tenants(self) -> list[str]:
        """Returns the names of all tenants that have a count of rows, the tenant with the largest count first."""
        rows = self.by_tenant("veilbase_rows_total")
        return sorted(rows, key=lambda name: (-rows[name], name))


def parse(text: str, at_s: float) -> Snapshot:
    """Parses metrics in Prometheus' text form, and returns them as a snapshot with the time `at_s`."""
    snapshot = Snapshot(at_s)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            snapshot.values[(sample.name, frozenset(sample.labels.items()))] = sample.value
    return snapshot


def render(now: Snapshot, before: Snapshot | None, uptime_s: float) -> Group:
    """Makes the table of a snapshot.

    Args:
        now: the newest snapshot.
        before: an earlier snapshot, so that the table shows rates since that time; None shows rates since the
            provider's start.
        uptime_s: how long the provider has been running, in seconds.

    Returns:
        The text and the table, for a rich console.
    """
    span = uptime_s if before is None else now.at_s - before.at_s

    def rate(name: str, **labels: str) -> float:
        return (now.get(name, **labels) - (before.get(name, **labels) if before else 0.0)) / max(span, 1e-9)

    batches = rate("veilbase_batch_rows_count")
    head = Text(
        f"up {uptime_s:.0f} s, {now.get('veilbase_streams'):.0f} streams, "
        f"{now.get('veilbase_queue_depth'):.0f} requests wait, {batches:.1f} products/s of "
        f"{_mean(rate, 'veilbase_batch_rows'):.0f} rows and {_mean(rate, 'veilbase_batch_requests'):.1f} requests, "
        f"{rate('veilbase_inline_requests_total'):.1f} small requests/s beside"
    )
    table = Table(
        "tenant", *(f"{one.name.lower()} rows/s" for one in RequestClass), "MB/s up", "MB/s down", "busy", "errors"
    )
    errors = now.by_tenant("veilbase_errors_total")
    for name in now.tenants():
        table.add_row(
            name,
            *(f"{rate('veilbase_rows_total', tenant=name, kind=one.name.lower()):.1f}" for one in RequestClass),
            f"{rate('veilbase_bytes_total', tenant=name, direction='up') / 1e6:.2f}",
            f"{rate('veilbase_bytes_total', tenant=name, direction='down') / 1e6:.2f}",
            f"{100 * rate('veilbase_compute_seconds_total', tenant=name):.0f}%",
            f"{errors.get(name, 0):.0f}",
        )
    return Group(head, *_registry(now), *_replicas(now), table)


def _registry(now: Snapshot) -> list[Text]:
    """Returns a list of one line if tenants are admitted by a copy of the registry, else an empty list."""
    left_s = now.values.get((REGISTRY_LEFT, frozenset()))
    if left_s is None:
        return []
    if left_s <= 0:
        return [Text("the copy of the registry is too old, and nobody is admitted: bring a new one", "bold red")]
    return [Text(f"the copy of the registry counts for another {left_s:.0f} s")]


def _replicas(now: Snapshot) -> list[Text]:
    """Returns a list of one line about the replicas if there are several or if one is lost, else an empty list."""
    live, lost = (now.by_label("veilbase_replicas", "shard", state=state) for state in ("live", "lost"))
    if len(live) == 1 and sum(live.values()) == 1 and not sum(lost.values()):
        return []
    names = sorted(live, key=int)
    shards = [f"{one}: {live[one]:.0f}" + (f" ({lost[one]:.0f} lost)" if lost.get(one) else "") for one in names]
    return [Text("replicas of shard " + ", ".join(shards))]


def _mean(rate: Callable[..., float], name: str) -> float:
    count = rate(f"{name}_count")
    return rate(f"{name}_sum") / count if count > 0 else 0.0


def look(folder: Path) -> Snapshot:
    """Reads the present metrics of the provider that runs with a state directory; see `read_metrics` for errors."""
    return parse(read_metrics(folder), time.monotonic())


def check(folder: Path) -> None:
    """Raises ConfigurationError if no provider is running, or if the provider has lost a shard for good.

    A copy of the registry that is too old is no reason: this check is for probes that start a provider again, which
    would not help.
    """
    if look(folder).get("veilbase_shards_given_up"):
        raise ConfigurationError("a shard of this provider is given up: it has to be started again")


def show(folder: Path, watch_s: float | None) -> None:
    """Prints the table once, or every `watch_s` seconds until interrupted; see `read_metrics` for errors."""
    console = Console()
    now = look(folder)
    first = render(now, None, _uptime_s(now))
    if watch_s is None:
        console.print(first)
        return
    with Live(first, console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            time.sleep(watch_s)
            before, now = now, look(folder)
            shown = render(now, before, _uptime_s(now))
            if live is None:
                console.print(shown)  # A pipe or a file gets one table after the other.
            else:
                live.update(shown, refresh=True)


def _uptime_s(now: Snapshot) -> float:
    return max(0.0, time.time() - now.get("veilbase_start_time_seconds"))
