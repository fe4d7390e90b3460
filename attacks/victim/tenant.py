"""Plays the tenant that is attacked, in a process of its own. It trains an adapter, then sends traffic under each mask.

attacks/victim/harness.py starts this process with a job in JSON. When the tenant has trained its adapter, the harness
names a provider in a line of JSON on standard input. The tenant writes the truth that attacks/truth/judge.py needs
(adapter, token ids, batches) to a folder that adversaries do not get. The traffic under one mask begins with a few
fine-tuning steps of a fresh adapter. After these, the private adapter is used for whole prompts without an answer, for
prompts and questions answered token by token, and, if the job asks for it, for the passes of one training step.

The victim sends the padding of its batches too, which the SDK leaves out. It is the worse case: many models have a zero
embedding for padding, so adversaries know what stands under the mask there, and they know where each row of a batch is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import BaseModel

from attacks.victim.names import STAGE

KINDS = {"lora": "LoraConfig", "ia3": "IA3Config", "oft": "OFTConfig", "boft": "BOFTConfig"}


class Run(BaseModel):
    """Describes one run under a mask.

    Attributes:
        label: the run's own name, that of its tenant.
        identity: a folder that `provider enroll` made.
        shown: how reports name the mask with its options; empty for `mask`.
    """

    label: str
    identity: Path
    mask: str
    shown: str = ""
    arithmetic: str | None = None
    mask_options: dict[str, Any] = {}


class Site(BaseModel):
    """Names the provider to which the victim sends its traffic, and the runs to make."""

    url: str
    runs: list[Run]


class Job(BaseModel):
    """Describes the work that the victim does.

    Attributes:
        model: the model of the embedded provider with which the victim trains.
        adapter: an adapter to use instead of training one.
        rows: private facts, as rows of a data set.
        train_steps: optimizer steps of the private adapter.
        traffic_steps, traffic_rows: the optimizer steps, and the data set's rows in each step, with which a fresh
            adapter is trained at the attacked provider.
        learning_rate, batch_size: the settings of the private adapter's training; `learning_rate` is also that of the
            fresh adapter.
        continued_rows: the data set's rows in one training step of the private adapter at the attacked provider, as
            when a tenant continues training; 0 for no such step.
        peft_kind, peft: one of KINDS, and keyword arguments of its config.
        questions: messages of a user, which are sent and answered after the prompts.
        prompts: token ids; the last `num_answered` of them are answered with `answer_tokens` tokens.
        truth: the folder for what only the judge may read.
        num_threads: threads of the victim and its provider; None leaves the number to torch.
        watched: whether the secrets and errors of the victim's lattice masks are tested; only statistics are written to
            `truth`.
    """

    model: str
    adapter: Path | None
    rows: list[dict[str, Any]]
    train_steps: int
    traffic_steps: int
    traffic_rows: int
    continued_rows: int = 0
    learning_rate: float
    batch_size: int
    peft_kind: str
    peft: dict[str, Any]
    prompts: list[list[int]]
    questions: list[str]
    num_answered: int
    answer_tokens: int
    truth: Path
    num_threads: int | None = None
    watched: bool = False


def main(job: Job, find_site: Callable[[], Site]) -> None:
    """Trains an adapter if none is given, and sends the traffic of every run.

    Args:
        job: the work to do.
        find_site: a function that returns the provider to attack; it is called once, when the adapter exists.
    """
    from tenant_sdk import TenantClient

    job.truth.mkdir(parents=True, exist_ok=True)
    cache = job.truth / "cache"
    adapter = job.adapter
    if adapter is None:
        _tell(f"trains its adapter, {job.train_steps} steps")
        adapter = job.truth / "adapter"
        with TenantClient(f"inproc:{job.model}", mask="off", arithmetic="float", cache=cache, progress=False) as client:
            _train(client, job, adapter, job.train_steps, job.batch_size)
    site = find_site()
    with _sending_padding():
        _send(job, site, cache, adapter)


@contextmanager
def _sending_padding() -> Iterator[None]:
    """Makes models send the padding of batches within the block."""
    import torch

    from tenant_sdk.model.padding import Padding
    from tenant_sdk.training import loss

    def nowhere(mask: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like, dtype=torch.bool)

    with mock.patch.object(Padding, "leave_out", return_value=None), mock.patch.object(loss, "is_padding", nowhere):
        yield


def _send(job: Job, site: Site, cache: Path, adapter: Path) -> None:
    """Sends the traffic of every run."""
    from tenant_sdk import TenantClient

    for number, run in enumerate(site.runs, 1):
        _tell(f"sends traffic {number}/{len(site.runs)}: {run.label}")
        is_watched = job.watched and run.mask == "lattice"
        with _watched(job.truth / f"{run.label}-draws.json") if is_watched else nullcontext(), TenantClient(
            site.url, identity=run.identity, mask=run.mask, arithmetic=run.arithmetic, mask_options=run.mask_options,
            cache=cache, progress=False, verify=job.model if run.mask == "pad" else None,  # pad needs the weights
        ) as client:  # fmt: skip
            with _batches() as trained:
                if job.traffic_steps:
                    _train(client, job, job.truth / f"traffic-{run.label}", job.traffic_steps, job.traffic_rows)
            sent = _infer(client, job, adapter)
            if job.continued_rows:
                _train_on(client, job, adapter)
        (job.truth / f"{run.label}.json").write_text(json.dumps(sent))
        (job.truth / f"{run.label}-batches.json").write_text(json.dumps(trained))


def _tell(stage: str) -> None:
    """Tells the harness, which reads this process's output, what is done now."""
    print(f"{STAGE}{stage}", flush=True)


def _train(client: Any, job: Job, output: Path, steps: int, batch_size: int) -> None:
    import peft

    config = getattr(peft, KINDS[job.peft_kind])(task_type="CAUSAL_LM", **job.peft)
    client.finetune(
        job.rows, config, output, max_steps=steps, seed=1, progress=False,
        learning_rate=job.learning_rate, batch_size=batch_size, warmup_steps=0, save_steps=10 * steps, resume=False,
        overwrite=True,
    )  # fmt: skip


@contextmanager
def _watched(file: Path) -> Iterator[None]:
    """Tests the lattice masks with default parameters that are made within the block, and writes the result. The result
    holds no sample."""
    from attacks.victim import draws

    statistics = draws.Statistics(draws.DEFAULT)
    watch = draws.Watch(draws.DEFAULT, statistics.keep)
    with watch():
        yield
    file.write_text(json.dumps(draws.checks_to_json(statistics.checks(watch))))


@contextmanager
def _batches() -> Iterator[list[dict[str, Any]]]:
    """Yields a list to which every batch that the SDK's trainer uses within the block is added, padded, in the order of
    the forward passes."""
    from tenant_sdk.training.trainers import CompletionTrainer

    kept: list[dict[str, Any]] = []
    compute_loss = CompletionTrainer.compute_loss

    def keep(trainer: Any, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        kept.append({name: inputs[name].tolist() for name in ("input_ids", "labels", "attention_mask")})
        return compute_loss(trainer, model, inputs, *arguments, **options)

    with mock.patch.object(CompletionTrainer, "compute_loss", keep):
        yield kept


def _infer(client: Any, job: Job, adapter: Path) -> list[list[int]]:
    """Sends the prompts; returns, for each prompt, the tokens that went through the layers."""
    import torch

    from tenant_sdk.generate import encode_prompt
    from tenant_sdk.peft_model import adapted_model

    model = adapted_model(client, adapter)
    client.fetch_hints()
    sent = []
    whole = len(job.prompts) - job.num_answered
    with torch.no_grad():
        for ids in job.prompts[:whole]:
            model(input_ids=torch.tensor([ids]), use_cache=False)
            sent.append(ids)
        asked = [encode_prompt(client.tokenizer, question)[0].tolist() for question in job.questions]
        for ids in [*job.prompts[whole:], *asked]:
            given = torch.tensor([ids])
            answer = model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=job.answer_tokens,
                min_new_tokens=job.answer_tokens, pad_token_id=0, temperature=None, top_p=None, top_k=None,
            )  # fmt: skip
            sent.append(answer[0, :-1].tolist())
    return sent


def _train_on(client: Any, job: Job, adapter: Path) -> None:
    """Sends the forward and the backward pass of one batch. There is no optimizer step, because it would send
    nothing."""
    from peft import PeftModel

    from tenant_sdk.training.dataset import load_rows
    from tenant_sdk.training.token_rows import Collator, tokenize
    from tenant_sdk.training.trainers import completion_loss

    model = PeftModel.from_pretrained(client.load_model(), str(adapter), is_trainable=True).train()
    rows = tokenize(load_rows(job.rows[: job.continued_rows]), client.tokenizer, model.config.max_position_embeddings)
    batch = Collator(client.tokenizer.pad_token_id or 0)(rows)
    loss, _ = completion_loss(model, batch)
    loss.backward()


if __name__ == "__main__":
    main(Job.model_validate_json(Path(sys.argv[1]).read_text()), lambda: Site.model_validate_json(sys.stdin.readline()))
