"""Runs the benchmarks in `MODULES`, one after the other; `make bench` calls this module.

Some benchmarks need more than `make setup` installs: a permission, a peer's wheel or a GPU. A benchmark that lacks what
it needs says so and is left out.
"""

from benchmarks import (
    accelerator,
    activations,
    adapter_loading,
    decode,
    encrypted_matmul,
    few_rows,
    finetune_step,
    kept_tensors,
    long_context,
    masks,
    memory,
    network,
    quality,
    scheduling,
    seeds,
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

MODULES = (
    finetune_step, decode, few_rows, transport, scheduling, memory, long_context, masks, tenant_cost, quality, seeds,
    network, adapter_loading, serving, speculation, encrypted_matmul, activations, kept_tensors,
    accelerator, serving_mix, tenant_memory,
)  # fmt: skip

for module in MODULES:
    print(f"\n## {(module.__doc__ or '').splitlines()[0]}\n", flush=True)
    try:
        module.main()
    except SystemExit as exc:
        if exc.code != NOT_POSSIBLE:
            raise
        print("not run here", flush=True)
