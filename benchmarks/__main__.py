"""Runs every benchmark, one after the other: `make bench`.

A benchmark that needs more than `make setup` (a permission, a peer's wheel or a GPU) prints what is
missing, and is then left out.
"""

from benchmarks import (
    accelerator,
    activations,
    decode,
    encrypted_matmul,
    few_rows,
    finetune_step,
    kept_tensors,
    masks,
    memory,
    network,
    quality,
    scheduling,
    seeds,
    tenant_cost,
    transport,
)

NOT_POSSIBLE = 2
"""The exit code of a benchmark that lacks a permission (network), a peer (encrypted_matmul) or a GPU (accelerator); the
benchmark itself prints what it lacks."""

MODULES = (
    finetune_step, decode, few_rows, transport, scheduling, memory, masks, tenant_cost, quality, seeds, network,
    encrypted_matmul, activations, kept_tensors, accelerator,
)  # fmt: skip

for module in MODULES:
    print(f"\n## {(module.__doc__ or '').splitlines()[0]}\n", flush=True)
    try:
        module.main()
    except SystemExit as exc:
        if exc.code != NOT_POSSIBLE:
            raise
        print("not run here", flush=True)
