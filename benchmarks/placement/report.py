"""Prints the results of the parts as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.placement.parts import PARTS

Found = dict[str, dict[str, Any]]
FIGURES_10_TO_12 = ("figure10", "figure10-many", "figure10-lattice")


def read(folder: Path) -> Found:
    """Returns the results in a folder, by part."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def pairs(found: Found, mask: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns, for each number of clients that was measured for Figures 10 to 12 with `mask` and locally, the row of
    the provider's side and the row of as many local processes, of the same part if they were measured in it."""
    parts = [found[name]["rows"] for name in FIGURES_10_TO_12 if name in found]
    anywhere = {row["clients"]: row for rows in parts for row in rows if row["side"] == "local"}
    paired = []
    for rows in parts:
        local = anywhere | {row["clients"]: row for row in rows if row["side"] == "local"}
        ours = [row for row in rows if row["side"] == "provider" and row["mask"] == mask]
        paired += [(row, local[row["clients"]]) for row in ours if row["clients"] in local]
    return paired


def show(found: Found) -> None:
    """Prints a table for each part that has results."""
    for name, one in found.items():
        print(f"\n{name}: model {one['model']}, {one['transport']}, {one['date']}, {one['processor']}, {one['cores']} "
              f"cores, {' '.join(one['instructions'])}; took {one['took_s']} s")  # fmt: skip
    plain = pairs(found, "off")
    _scaling("mask off", plain)
    _scaling("lattice", pairs(found, "lattice"))
    _fits(plain)
    if "figure10-mapped" in found:
        _mapped(found["figure10-mapped"]["rows"], {one["clients"]: one for one, _ in plain})
    if "table2" in found:
        _loras(found["table2"]["rows"])
    if "figure13" in found:
        _places(found["figure13"]["rows"])
    if "figure18" in found:
        _slow(found["figure18"]["rows"])


def _table(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def _scaling(mask: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    if not rows:
        return
    _table(f"figure 10, {mask}: MB", "clients", "provider", "clients together", "local processes", "ratio")
    for ours, local in rows:
        ratio = (ours["provider_mb"] + ours["clients_mb"]) / local["clients_mb"]
        print(f"| {ours['clients']} | {ours['provider_mb']:,.0f} | {ours['clients_mb']:,.0f} | "
              f"{local['clients_mb']:,.0f} | {ratio:.2f} |")  # fmt: skip
    _own(mask, rows)
    _table(f"figures 11 and 12, {mask}", "clients", "step, s", "local", "ratio", "tokens/s", "local", "ratio",
           "processor s a step: client + provider", "local", "tokens per processor s, ratio",
           "others' share of the machine: ours, local")  # fmt: skip
    for ours, local in rows:
        used, least = ours["clients_cpu_s"] + ours["provider_cpu_s"], local["clients_cpu_s"]
        print(f"| {ours['clients']} | {ours['step_s']:.2f} | {local['step_s']:.2f} | "
              f"{ours['step_s'] / local['step_s']:.2f} | {ours['tokens_per_s']:.1f} | {local['tokens_per_s']:.1f} | "
              f"{ours['tokens_per_s'] / local['tokens_per_s']:.2f} | {ours['clients_cpu_s']:.2f} + "
              f"{ours['provider_cpu_s']:.2f} | {least:.2f} | {least / used:.2f} | {ours['others_share']:.2f}, "
              f"{local['others_share']:.2f} |")  # fmt: skip


def _own(mask: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Prints the clients' own memory, without mapped files, where both sides' was measured."""
    known = [(ours, local) for ours, local in rows if "clients_own_mb" in ours and "clients_own_mb" in local]
    if known:
        _table(
            f"own memory of the tenant's side, {mask}: MB", "clients", "clients together", "local processes", "ratio"
        )
    for ours, local in known:
        mine, theirs = ours["clients_own_mb"], local["clients_own_mb"]
        print(f"| {ours['clients']} | {mine:,.0f} | {theirs:,.0f} | {mine / theirs:.2f} |")


def _fits(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Prints how many clients, with their provider, fit into the memory that the largest measured number of local
    processes takes. Prints nothing if fewer than two numbers of clients were measured."""
    if len(rows) < 2:
        return
    (first, _), (last, local) = rows[0], rows[-1]
    each = (last["clients_mb"] - first["clients_mb"]) / (last["clients"] - first["clients"])
    fit = (local["clients_mb"] - last["provider_mb"]) / each
    print(f"\nA further client takes {each:,.0f} MB, so the memory of {local['clients']} local processes holds "
          f"{fit:.1f} clients and the provider: {fit / local['clients']:.1f} times as many")  # fmt: skip


def _loras(rows: list[dict[str, Any]]) -> None:
    local = {row["lora"]: row for row in rows if row["side"] == "local"}
    _table("table 2", "adapter", "step, s", "local", "ratio", "processor s a step: client + provider", "local",
           "MB, client", "local", "calls", "MB up", "MB down")  # fmt: skip
    for row in rows:
        if row["side"] == "provider":
            peer = local[row["lora"]]
            print(f"| {row['lora']} | {row['step_s']:.2f} | {peer['step_s']:.2f} | "
                  f"{row['step_s'] / peer['step_s']:.2f} | {_used(row)} | {_used(peer)} | {row['clients_mb']:,.0f} | "
                  f"{peer['clients_mb']:,.0f} | {row['calls']} | {row['mb_up']:.0f} | "
                  f"{row['mb_down']:.0f} |")  # fmt: skip


def _used(row: dict[str, Any]) -> str:
    both = f"{row['clients_cpu_s']:.2f} + {row['provider_cpu_s']:.2f}"
    return both if row["side"] == "provider" else f"{row['clients_cpu_s']:.2f}"


def _places(rows: list[dict[str, Any]]) -> None:
    local = {row["clients"]: row for row in rows if row["side"] == "local"}
    _table("figures 13 to 17", "place of the clients", "shards", "clients", "step, s", "relative to local", "tokens/s",
           "processor s a step: client + provider", "MB, clients", "MB, provider",
           "others' share of the machine")  # fmt: skip
    for row in rows:
        place = row.get("place", "local processes")
        print(f"| {place} | {row.get('shards', '')} | {row['clients']} | {row['step_s']:.2f} | "
              f"{row['step_s'] / local[row['clients']]['step_s']:.2f} | {row['tokens_per_s']:.1f} | {_used(row)} | "
              f"{row['clients_mb']:,.0f} | {row['provider_mb']:,.0f} | {row['others_share']:.2f} |")  # fmt: skip


def _mapped(rows: list[dict[str, Any]], ours: dict[int, dict[str, Any]]) -> None:
    _table("figure 10 where local processes share the mapped checkpoint: MB", "clients", "provider and clients",
           "local processes", "ratio")  # fmt: skip
    for row in rows:
        if one := ours.get(row["clients"]):
            total = one["provider_mb"] + one["clients_mb"]
            print(f"| {row['clients']} | {total:,.0f} | {row['clients_mb']:,.0f} | {total / row['clients_mb']:.2f} |")


def _slow(rows: list[dict[str, Any]]) -> None:
    alone = {row["side"]: row["step_s"] for row in rows if row["slow"] == "none"}
    _table("figure 18", "steps of", "busy loop on the core of", "the loop's share of it", "step, s", "relative",
           "processor s a step: client + provider")  # fmt: skip
    for row in rows:
        side = "a client" if row["side"] == "provider" else "a local process"
        print(f"| {side} | {row['slow']} | {row['loop_share']:.2f} | {row['step_s']:.2f} | "
              f"{row['step_s'] / alone[row['side']]:.2f} | {_used(row)} |")  # fmt: skip
