"""Every benchmark, one after the other: `make bench`."""

from benchmarks import decode, finetune_step, memory, transport

for module in (finetune_step, decode, transport, memory):
    print(f"\n## {(module.__doc__ or '').splitlines()[0]}\n", flush=True)
    module.main()
