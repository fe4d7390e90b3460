"""Measures the provider's replica on a device: rows a second by the rows of a request and the tenants that share a
product, and the share of the time that is not the product itself.

Groups have the shapes of one block of Llama-2-7B. Requests and replies are on the CPU, as they are when they come from
a network and go back to it.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.accelerator.products import BLOCK, QUICK_BLOCK

if TYPE_CHECKING:
    from benchmarks.accelerator import Setting
    from provider.model.served_group import ServedGroup

CASES = ((1, 1), (1, 8), (1, 32), (128, 1), (128, 8), (1024, 1), (1024, 4))
"""The measured cases: rows of each request, and tenants whose requests share a product."""
QUICK_CASES = ((1, 1), (1, 3), (20, 2))


def run(setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds of a block for each case, and how many replies differ from the CPU's product in the rows
    that are compared: the first four rows of each tenant's reply, for each case and layer group."""
    import torch

    from provider.device.on_device import OnDevice
    from wire.frame import Arithmetic, Call, Direction
    from wire.ring import coding

    groups = _groups(QUICK_BLOCK if setting.is_quick else BLOCK)
    expected = {group.info.id: group.quantised for group in groups}
    replica = OnDevice(list(groups), torch.device(setting.device))
    results: dict[str, Any] = {"wrong numbers": 0}
    for num_rows, num_tenants in QUICK_CASES if setting.is_quick else CASES:
        asked = []
        for group in groups:
            shape = num_rows, group.info.in_features
            parts = [torch.randint(-(2**31), 2**31, shape).to(torch.int32) for _ in range(num_tenants)]
            asked.append((Call(group.info.id, Direction.FORWARD, Arithmetic.RING), parts))
        replies = [replica.products(call, parts) for call, parts in asked]
        for (call, parts), found in zip(asked, replies, strict=True):
            for reply, part in zip(found, parts, strict=True):
                results["wrong numbers"] += int((reply[:4] != coding.product(part[:4], expected[call.group])).sum())
        whole = _median(lambda asked=asked: [replica.products(*each) for each in asked], 2 if setting.is_quick else 15)
        alone = _median(_on_the_device(replica, asked, setting.device), 2 if setting.is_quick else 15)
        results[f"{num_rows} rows of each of {num_tenants} tenants"] = {
            "ms a block": whole * 1e3, "rows/s": num_rows * num_tenants / whole,
            "copies and rest, %": max(0.0, 100 * (1 - alone / whole)),
        }  # fmt: skip
        setting.note(results)
    replica.close()
    return results


def _median(work: Any, repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _on_the_device(replica: Any, asked: Any, device: str) -> Any:
    """Returns a function that computes the same products of rows that are on the device already."""
    import torch

    from wire.ring import coding

    there = [
        (torch.cat(parts).to(device), replica.moved_groups[call.group].weights[call.direction]) for call, parts in asked
    ]

    def work() -> None:
        for rows, weight in there:
            coding.product(rows, weight)
        if device != "cpu":
            torch.cuda.synchronize(device)

    return work


def _groups(shapes: Any) -> list[ServedGroup]:
    """Returns groups of random int8 weights."""
    import torch

    from provider.model.served_group import ServedGroup
    from wire.manifest import GroupInfo, LayerInfo
    from wire.ring.quantise import digest, max_norms

    groups = []
    for number, (d, m) in enumerate(shapes):
        quantised = torch.randint(-127, 128, (d, m), dtype=torch.int8)
        alpha = torch.full((m,), 1e-3)
        column, row = max_norms(quantised)
        told: dict[str, Any] = {
            "in_features": d, "out_features": m, "max_column_norm": column, "max_row_norm": row,
            "digest": digest(quantised, alpha),
        }  # fmt: skip
        layer = LayerInfo(name=f"layer{number}", kind="linear", bias=False, **told)
        info = GroupInfo(id=number, name=layer.name, layers=(layer,), **told)
        groups.append(ServedGroup(info, quantised, alpha, None, None))
    return groups
