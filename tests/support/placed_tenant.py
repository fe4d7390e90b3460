"""Takes one training step as a tenant, in a process of its own, and prints a digest of the step's results.

The command is `python -m tests.support.placed_tenant URL IDENTITY CACHE`, where IDENTITY may be empty. Under torchrun
the tenants of all ranks form a process group of gloo, compare their digests, and rank 0 prints.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch


def step_digest(url: str, identity: str, cache: Path) -> str:
    """Returns a digest of the loss and of all gradients of a LoRA adapter in one step without a mask, which is equal
    wherever the provider is: its products are exact."""
    from peft import LoraConfig, get_peft_model

    from tenant_sdk import TenantClient

    torch.set_num_threads(1)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with TenantClient(url, identity=identity or None, mask="off", arithmetic="ring", cache=cache) as client:
        torch.manual_seed(3)
        model: Any = get_peft_model(client.load_model(), config)
        token_ids = torch.randint(3, 127, (2, 12), generator=torch.Generator().manual_seed(1))
        loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert len(gradients) == 28, "an A and a B for each of two blocks' seven layers"
    assert all(torch.any(each != 0) for each in gradients.values())
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for _, gradient in sorted(gradients.items()):
        digest.update(gradient.numpy().tobytes())
    return digest.hexdigest()


def main(url: str, identity: str, cache: str) -> None:
    """Prints the digest, after comparing it with those of the other ranks if there are any."""
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digest = step_digest(url, identity, Path(cache) / str(rank))
    if dist.is_initialized():
        own = torch.tensor(list(bytes.fromhex(digest)))
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        assert dist.get_world_size() == 2
        assert all(torch.equal(own, each) for each in every)
        dist.barrier()
    if rank == 0:
        print(digest, flush=True)
    if dist.is_initialized():
        os._exit(0)  # gloo's threads abort a process now and then when the interpreter ends (torch 2.13)


if __name__ == "__main__":
    main(*sys.argv[1:])
