"""Runs one fine-tuning client, a tenant or a local process, as a `Worker` process with one thread.

Its argument is a JSON object, the fields of `Job`. Each unit of work is one step of LoRA: forward pass, backward pass,
AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import serve_worker
from benchmarks.placement.model import DEFAULT_LORA, VOCABULARY

NUM_TOKENS = 128
"""The tokens of the one sequence that every step trains on."""


@dataclass(frozen=True)
class Job:
    """Says what one process does.

    Attributes:
        model: the folder of the model.
        url: the provider's URL for a tenant; empty for a local process, which runs transformers + PEFT.
        identity: the folder of the tenant's identity; None for a local process or a provider in the tenant's process.
        mask: the tenant's mask.
        cache: the tenant's folder for bundles and hints.
        rank, targets: the LoRA adapter.
        is_mapped: whether a local process leaves its weights in the mapped checkpoint, as transformers does on a CPU,
            so that all such processes share them; by default it copies the weights, as it would to an accelerator.
        core: the only core that the process may use; None allows all.
        report: the file to which a tenant writes, after each step, that step's calls and MB; None writes nothing.
    """

    model: str
    url: str = ""
    identity: str | None = None
    mask: str = "off"
    cache: str | None = None
    rank: int = DEFAULT_LORA.rank
    targets: str | tuple[str, ...] = DEFAULT_LORA.targets
    is_mapped: bool = False
    core: int | None = None
    report: str | None = None

    def as_argument(self) -> str:
        """Returns the job as the argument of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> Job:
        """Returns the job in a text that `as_argument` made."""
        fields = json.loads(text)
        if isinstance(fields["targets"], list):
            fields["targets"] = tuple(fields["targets"])
        return cls(**fields)


def step_of(model: Any, job: Job) -> Callable[[], Any]:
    """Returns a function that takes one step on a model with the adapter of `job`."""
    import torch
    from peft import LoraConfig, get_peft_model

    targets = job.targets if isinstance(job.targets, str) else list(job.targets)
    config = LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules=targets, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-4)
    ids = torch.randint(VOCABULARY, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _run_local(job: Job) -> None:
    """Takes local steps with transformers + PEFT, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    from runtime.loading import quiet_transformers

    torch.set_num_threads(1)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    if not job.is_mapped:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    serve_worker(step_of(model.requires_grad_(False), job))


def _run_tenant(job: Job) -> None:
    """Takes a tenant's steps, with activations in bfloat16 as in `_run_local`."""
    import tenant_sdk

    tenant_sdk.tune()
    import torch

    torch.set_num_threads(1)
    options = {"background": False} if job.mask == "lattice" else {}
    with tenant_sdk.TenantClient(
        job.url, identity=job.identity, mask=job.mask, arithmetic="ring", mask_options=options, cache=job.cache,
        dtype=torch.bfloat16, progress=False,
    ) as client:  # fmt: skip
        client.fetch_hints(backward=True)
        step = step_of(client.load_model(), job)

        def reported() -> None:
            before = client.traffic
            step()
            after = client.traffic
            if job.report is not None:
                found = {"calls": after.calls - before.calls, "mb_up": (after.bytes_up - before.bytes_up) / 1e6,
                         "mb_down": (after.bytes_down - before.bytes_down) / 1e6}  # fmt: skip
                Path(job.report).write_text(json.dumps(found))

        serve_worker(reported)


def main() -> None:
    """Runs the job that the command line gives."""
    job = Job.from_argument(sys.argv[1])
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})
    (_run_tenant if job.url else _run_local)(job)


if __name__ == "__main__":
    main()
