"""Replays the load of tenants for `benchmarks.batching`, by sending rows that a real tenant sent, layer after layer.

The rows come from one step of fine-tuning with lattice masks, which is recorded first. For layers of other widths, such
as those of Llama's block, the rows are uniform int32 numbers, as masked rows are.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import provider

BLOCKS = "model.layers.[0-5].*"
"""The pattern of the layers that are served: six of the model's thirty blocks, so that a forward pass is 24
requests."""
LOAD_CORE = 1


@dataclass(frozen=True)
class Load:
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
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.replayer", "step", url, str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    by_width: dict[str, list[torch.Tensor]] = {}
    for line in (seen / "index.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["purpose"] == "product" and entry["file"]:
            rows = load_file(seen / entry["file"])["request"]
            by_width.setdefault(str(rows.shape[1]), []).append(rows)
    save_file({width: torch.cat(each) for width, each in by_width.items()}, folder / "rows.safetensors")
    return folder / "rows.safetensors"


def take_step(url: str, folder: Path) -> None:
    """Takes one fine-tuning step as the tenant `recorded`, whose requests the provider records."""
    import tenant_sdk
    from benchmarks.finetune_step import step_of

    tenant_sdk.tune()
    with tenant_sdk.TenantClient(url, identity=folder / "recorded", mask="lattice", cache=folder) as client:
        step_of(client.load_model())()


# ---- the load's process ----------------------------------------------------------------------------------------------


def replay(url: str, folder: Path, recording: Path, loads: Sequence[Load]) -> None:
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

    def connect(load: Load) -> GrpcConnection:
        return GrpcConnection(url, TlsIdentity.read(folder / load.tenant))

    def work(load: Load, connection: GrpcConnection) -> None:
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


if __name__ == "__main__":
    if sys.argv[1] == "step":
        take_step(sys.argv[2], Path(sys.argv[3]))
    else:
        replay(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), [Load(**one) for one in json.loads(sys.argv[5])])
