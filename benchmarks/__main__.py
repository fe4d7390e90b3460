"""Runs the benchmarks in `RUNS`, one after the other; `make bench` calls this module.

Some benchmarks need more than `make setup` installs: a permission, a peer's wheel or a GPU. A benchmark that lacks what
it needs says so and is left out.
"""

import sys

from benchmarks import (
    accelerator,
    activations,
    adapters,
    cost,
    decode,
    encrypted_matmul,
    few_rows,
    finetune_step,
    long_context,
    masks,
    memory,
    network,
    quality,
    scheduling,
    serving,
    serving_mix,
    speculation,
    tenant_cost,
    tenant_memory,
    transport,
)

NOT_POSSIBLE = 2
"""The exit code of a benchmark that lacks a permission (network), a peer (encrypted_matmul) or a GPU (accelerator). The
benchmark itself prints what is missing."""

RUNS = (
    finetune_step.main, decode.main, few_rows.main, transport.main, scheduling.main, memory.main, long_context.main,
    masks.main, tenant_cost.main, quality.main, quality.compare_seeds, network.main, adapters.main, serving.main,
    speculation.main, encrypted_matmul.main, activations.main, activations.show_kept, accelerator.main,
    serving_mix.main, tenant_memory.main, cost.main,
)  # fmt: skip

for run in RUNS:
    said = sys.modules[run.__module__].__doc__ if run.__name__ == "main" else run.__doc__
    print(f"\n## {(said or '').splitlines()[0]}\n", flush=True)
    try:
        run()
    except SystemExit as exc:
        if exc.code != NOT_POSSIBLE:
            raise
        print("not run here", flush=True)
