"""Counts each tenant's usage by class of work, and shows the counts in a usage file: as a table, CSV or JSON, by day,
month or in total, with what it costs.

How counts are saved, and what is guaranteed of the file, is in wire/usage.py, which the tenant uses too.

Guarantees of costs: they are computed in decimal arithmetic from the numbers that are shown, and rounded half to even
to `COST_DIGITS` digits. A row's cost is the sum of its parts as shown, and the last line of a table the sum of the
lines above it. So the costs of days need not add up to exactly the cost of their month: each was rounded.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import wire.usage
from provider.schedule.ticket import RequestClass
from runtime.command_line import aligned, instead, plain_message
from wire.errors import ConfigurationError, os_cause
from wire.usage import FILE_NAME as FILE_NAME
from wire.usage import Account, UsageFile, read_usage_file
from wire.usage import Usage as Usage
from wire.usage import UsageCounter as UsageCounter

CLASSES = tuple(one.name.lower() for one in RequestClass)
"""The names by which requests are counted, in the order of `RequestClass`."""
COST_DIGITS = 4
"""The digits of a cost after the point: a day of a small tenant costs less than a cent."""
_MOST_PRICE_BYTES = 1 << 16
_LOGGER = logging.getLogger(__name__)


class UsageBook(wire.usage.UsageBook):
    """Holds the usage counts of all tenants since the provider's start, and adds these counts to a file. A save that
    fails is logged, and tenants are still served."""

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.time) -> None:
        """Makes a book without tenants, and checks that the file can be read; see `wire.usage.UsageBook`.

        Args:
            path: the file to which counts are added; None if counts are not to be saved.
            now: returns the Unix time, in seconds.

        Raises:
            ConfigurationError: the file exists, but is not a usage file or cannot be read.
        """
        super().__init__(path, CLASSES, lambda line: _LOGGER.error("%s", line), now)


def read_usage(path: Path) -> dict[str, Usage]:
    """Returns the totals in a usage file, by tenant's name; an empty dict if there is no file.

    Raises:
        ConfigurationError: the file is not a usage file, or cannot be read.
    """
    return {name: account.total() for name, account in read_usage_file(path).tenants.items()}


# ---- prices ----------------------------------------------------------------------------------------------------------

_Price = Annotated[Decimal, Field(ge=0, le=10**9, max_digits=21, decimal_places=12, allow_inf_nan=False)]


class PriceList(BaseModel):
    """Holds what usage costs. A GB has 10^9 bytes. What has no price costs nothing.

    Attributes:
        currency: three capital letters, such as EUR.
        per_gb_up, per_gb_down: the price of bytes in requests, and of bytes in replies.
        per_million_rows, per_million_tokens: the price of rows, and of tokens (`wire.usage.StreamTokens`).
        per_hour: the price of an hour of the time of products (`Usage.seconds`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str = Field(pattern="^[A-Z]{3}$")
    per_gb_up: _Price | None = None
    per_gb_down: _Price | None = None
    per_million_rows: _Price | None = None
    per_million_tokens: _Price | None = None
    per_hour: _Price | None = None

    @classmethod
    def read(cls, path: Path) -> PriceList:
        """Reads a YAML file with the attributes as keys. Numbers are taken as they are written, without binary
        rounding.

        Raises:
            ConfigurationError: the file cannot be read, or a key or a price in it is impossible.
        """
        try:
            return cls.model_validate(_pairs(path))
        except ValidationError as exc:  # `from None`: the exception's text quotes the value.
            first = exc.errors(include_url=False, include_input=False)[0]
            key = ascii(str(first["loc"][0]))[1:-1][:80]
            if first["type"] == "extra_forbidden":
                advice = instead(key, cls.model_fields, "docs/operations.md")
                raise ConfigurationError(f"{path}: {key} is no key of a price list: {advice}") from None
            if key == "currency":
                raise ConfigurationError(f"{path}: expected currency: and three capital letters, as EUR") from None
            raise ConfigurationError(f"{path}: {key}: {plain_message(first['msg'])}") from None

    def costs(self, usage: Usage) -> dict[str, Decimal]:
        """Returns what usage costs, by what was used, and as `cost` the sum; only what has a price is named."""
        million, gb = Decimal(10**6), Decimal(10**9)
        used = {
            "up": (self.per_gb_up, usage.bytes_up / gb),
            "down": (self.per_gb_down, usage.bytes_down / gb),
            "rows": (self.per_million_rows, sum(usage.rows.values()) / million),
            "tokens": (self.per_million_tokens, sum(usage.tokens.values()) / million),
            "time": (self.per_hour, Decimal(_seconds(usage)) / 3600),
        }
        with localcontext(prec=60):
            parts = {
                f"cost_{name}": (price * quantity).quantize(Decimal(1).scaleb(-COST_DIGITS), ROUND_HALF_EVEN)
                for name, (price, quantity) in used.items()
                if price is not None
            }
            return {**parts, "cost": sum(parts.values(), Decimal(0))}


def _pairs(path: Path) -> dict[str, str]:
    """Returns the keys and values of a YAML file, all as texts; raises ConfigurationError if it is not such a file, has
    a key twice or no price."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_PRICE_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(f"the price list {str(path)!r} cannot be read: {exc.strerror}") from os_cause(exc)
    no_list = f"{str(path)!r} is not a price list: expected lines such as `currency: EUR` and `per_gb_up: 0.05`"
    if len(data) > _MOST_PRICE_BYTES:
        raise ConfigurationError(no_list)
    try:
        tree = yaml.compose(data, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):  # `from None`: the exception's text quotes the file.
        raise ConfigurationError(no_list) from None
    nodes = [node for pair in tree.value for node in pair] if isinstance(tree, yaml.MappingNode) else []
    if not nodes or not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        raise ConfigurationError(no_list)
    names, values = ([str(node.value) for node in nodes[start::2]] for start in (0, 1))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"{path}: {ascii(twice)[1:-1][:80]} is there twice: keep one of them")
    if set(names) <= {"currency"}:
        prices = ", ".join(name for name in PriceList.model_fields if name != "currency")
        raise ConfigurationError(f"{path}: expected at least one price of {prices}")
    return dict(zip(names, values, strict=True))


def _seconds(usage: Usage) -> str:
    return f"{usage.seconds:.3f}"


# ---- periods ---------------------------------------------------------------------------------------------------------

PERIODS = ("day", "month", "total")


class Period(NamedTuple):
    """Holds what one tenant used in a day, a month, before days were counted, or in total."""

    name: str
    tenant: str
    usage: Usage


@dataclass
class Report:
    """Holds usage by tenant and period, and lines about what is not in it or not known.

    Attributes:
        by: one of `PERIODS`.
        periods: the periods with usage; of each tenant the earliest first.
        notes: the lines.
        prices: what usage costs; None shows no costs.
    """

    by: str
    periods: list[Period] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prices: PriceList | None = None

    def table(self) -> str:
        """Returns the report as a table with a line for each period, and a last line with sums if there are several;
        an empty text if there is no period."""
        if not self.periods:
            return ""
        costs = [{} if self.prices is None else self.prices.costs(each.usage) for each in self.periods]
        titles = (
            {name: f"{self.prices.currency} {name.removeprefix('cost_')}" for name in costs[0]} if self.prices else {}
        )
        named = [] if self.by == "total" else [("period", [each.name for each in self.periods])]
        columns: list[tuple[str, list[str]]] = [*named, ("tenant", [each.tenant for each in self.periods])]
        num_names = len(columns)
        rows = [_plain(each.usage) for each in self.periods]
        if not any(row["weight_bytes"] for row in rows):
            rows = [{name: number for name, number in row.items() if name != "weight_bytes"} for row in rows]
        columns += [(name.replace("_", " "), [f"{row[name]:,}" for row in rows]) for name in rows[0]]
        columns += [(titles[name], [f"{cost[name]:,}" for cost in costs]) for name in titles]
        if len(rows) > 1:
            sums = ["sum", *[""] * (num_names - 1), *(f"{sum(row[name] for row in rows):,}" for name in rows[0])]
            sums += [f"{sum(cost[name] for cost in costs):,}" for name in titles]
            columns = [(title, [*cells, last]) for (title, cells), last in zip(columns, sums, strict=True)]
        return aligned(columns, num_names)

    def csv(self) -> str:
        """Returns the report as CSV with a header, also by class of work; without sums of several periods."""
        out = io.StringIO()
        currency = [] if self.prices is None else ["currency"]
        priced = [] if self.prices is None else list(self.prices.costs(Usage()))
        writer = csv.writer(out, lineterminator="\n")
        split = [f"{what}_{name}" for what in ("requests", "rows", "tokens") for name in CLASSES]
        writer.writerow(["period", "tenant", *_plain(Usage()), *split, *currency, *priced])
        for name, tenant, usage in self.periods:
            by_class = [each.get(one, 0) for each in (usage.requests, usage.rows, usage.tokens) for one in CLASSES]
            cost = [] if self.prices is None else [self.prices.currency, *self.prices.costs(usage).values()]
            writer.writerow([name, tenant, *_plain(usage).values(), *by_class, *cost])
        return out.getvalue()

    def json(self) -> str:
        """Returns the report as JSON: usage by tenant or, unless it is in total, by tenant and period."""
        made: dict[str, Any] = {}
        for name, tenant, usage in self.periods:
            shown: dict[str, Any] = usage.model_dump()
            if self.prices is not None:
                shown["currency"] = self.prices.currency
                shown |= {key: str(cost) for key, cost in self.prices.costs(usage).items()}
            if self.by == "total":
                made[tenant] = shown
            else:
                made.setdefault(tenant, {})[name] = shown
        return json.dumps(made, indent=1) + "\n"


def _plain(usage: Usage) -> dict[str, int | Decimal]:
    """Returns the numbers of a table's line or a CSV file's row, by name."""
    return {
        "requests": sum(usage.requests.values()), "rows": sum(usage.rows.values()),
        "tokens": sum(usage.tokens.values()), "bytes_up": usage.bytes_up, "bytes_down": usage.bytes_down,
        "seconds": Decimal(_seconds(usage)), "errors": sum(usage.errors.values()), "weight_bytes": usage.weight_bytes,
    }  # fmt: skip


def report(
    file: UsageFile, by: str = "total", since: date | None = None, until: date | None = None, tenant: str | None = None
) -> Report:
    """Returns what is in a usage file.

    Args:
        file: the file.
        by: one of `PERIODS`.
        since, until: the first and last UTC day; None for no bound. A note names what is left out since its days are
            not known.
        tenant: the only tenant; None for all.
    """
    made = Report(by)
    undated = "undated" if file.since is None else f"before {file.since}"
    has_undated = False
    for name, account in sorted(file.tenants.items()):
        if tenant is not None and name != tenant:
            continue
        by_period: dict[str, Usage] = {}
        for period, usage in _chosen(account, undated, file.since, since, until, made.notes):
            has_undated |= period == undated
            shown = {"day": period, "month": period if period == undated else period[:7], "total": "total"}[by]
            by_period[shown] = by_period.get(shown, Usage()).plus(usage)
        made.periods += [Period(period, name, usage) for period, usage in by_period.items()]
    made.notes = list(dict.fromkeys(made.notes))  # A month is left out for all tenants alike.
    if has_undated:
        made.notes.append(f"what is {undated} was counted by an earlier release: it has no days, and tokens count as 0")
    return made


def _chosen(
    account: Account, undated: str, dated_from: date | None, since: date | None, until: date | None, notes: list[str]
) -> Iterator[tuple[str, Usage]]:
    """Yields the name and usage of each of an account's periods between two days, in order of time."""
    if not account.before.is_zero:
        if since is None and (until is None or (dated_from is not None and until >= dated_from)):
            yield undated, account.before
        else:
            notes.append(f"left out: what is {undated} was counted by an earlier release, without days")
    kept: dict[str, Usage] = {}
    for month, usage in account.months.items():
        days = _days_of(month)
        if (since is None or since <= days[0]) and (until is None or until >= days[1]):
            kept[month] = usage
        elif (since is None or since <= days[1]) and (until is None or until >= days[0]):
            notes.append(f"left out: {month}, of which only the sum is kept, and not all its days are asked for")
    for day, usage in account.days.items():
        if (since is None or since <= day) and (until is None or until >= day):
            kept[day.isoformat()] = usage
    yield from sorted(kept.items())


def _days_of(month: str) -> tuple[date, date]:
    """Returns the first and last day of a month, such as "2026-07"."""
    first = date.fromisoformat(f"{month}-01")
    following = date(first.year + first.month // 12, first.month % 12 + 1, 1)
    return first, date.fromordinal(following.toordinal() - 1)


def given_day(option: str, text: str | None) -> date | None:
    """Returns the day that an option names; raises ConfigurationError if it names none."""
    if text is None:
        return None
    try:
        return date.fromisoformat(text if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else "")
    except ValueError:
        raise ConfigurationError(f"{option}: expected a day such as 2026-07-31, got {text[:40]!a}") from None


def given_period(text: str) -> str:
    """Returns the period that --by names; raises ConfigurationError if it names none."""
    if text not in PERIODS:
        raise ConfigurationError(f"--by: {text[:40]!a} is no period: {instead(text, PERIODS, '--help')}")
    return text
