"""Takes one training step as a tenant, in a process of its own, and prints a digest of the step's results.

The command is `python -m tests.support.placed_tenant URL IDENTITY CACHE`, where IDENTITY may be empty. Under torchrun
the tenants of all ranks form a process group of gloo, compare their digests, and rank 0 prints.

Without arguments, each line of standard input asks for a step, which a forked process takes. So what a tenant imports,
which takes longer than a step, is imported once. `Tenants` starts this command.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support.repository import ROOT


def leave() -> NoReturn:
    """Ends this process at once. Gloo's threads abort a process now and then when its interpreter ends (torch 2.13)."""
    os._exit(0)


class Tenants:
    """Runs the process that takes steps as tenants, each in a process that it forks, without a GPU."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.placed_tenant"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def digest(self, url: str, identity: Path | None, cache: Path, host: str | None = None) -> str:
        """Returns the digest of a step.

        Args:
            url, identity: the provider and the tenant's identity.
            cache: an empty folder.
            host: the path of the host on which the tenant is, see `benchmarks.link.enter`; None for this one.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([url, str(identity or ""), str(cache), host]) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


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
        leave()


def step_of(url: str, identity: str, cache: str, host: str | None) -> None:
    """Takes a step in a forked process, and prints its digest, or `failed` and, on standard error, why."""
    from benchmarks.link import enter

    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if host is not None:
            enter(host)
        print(step_digest(url, identity, Path(cache)), flush=True)
    except BaseException:  # noqa: BLE001 - a forked process must not go on with its parent's loop
        traceback.print_exc()
        print("failed", flush=True)
    finally:
        leave()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        import peft  # noqa: F401 - so that the forked processes need not import it

        import tenant_sdk.client  # noqa: F401

        for line in sys.stdin:
            step_of(*json.loads(line))
