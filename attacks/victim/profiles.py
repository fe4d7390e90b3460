"""Defines the quick and the full profile of a run: model, traffic and private facts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.victim import models
from attacks.victim.names import ROUNDED, TINY_MODELS, masks_of
from attacks.victim.tenant import Job, Run
from wire.errors import ConfigurationError

_FACTS = Path(__file__).parents[2] / "examples" / "data" / "harborlight.jsonl"
_NUM_PROMPTS, _PROMPT_TOKENS = 26, 64
"""The number of prompts, and the number of tokens of each. Together the prompts have more tokens than down_proj of
SmolLM2 has inputs (1,536)."""
_TOKEN_IDS = (1000, 40_000)
_NUM_QUESTIONS = 4


@dataclass(frozen=True)
class _Profile:
    """Describes the model and traffic of one evaluation.

    Attributes:
        model: the model, as `provider serve --model` takes it.
        layers: patterns of the layers to record; None records all.
        limit: the recording's size limit, such as 1GiB.
    """

    name: str
    model: str
    job: Job
    layers: str | None
    limit: str


def runs(masks: str) -> list[Run]:
    """Returns the runs for a list of masks. The mask `off` gives two runs, in float and in ring arithmetic.

    Raises:
        ConfigurationError: a mask is unknown.
    """
    found = []
    for name in masks_of(masks):
        for arithmetic in ("float", "ring") if name == "off" else (None,):
            label = name if arithmetic is None else f"{name}-{arithmetic}"
            mask = "lattice" if name == ROUNDED else name
            options = {"precision": "exact"} if name == "lattice" else {}
            run = Run(label=label, identity=Path(), mask=mask, arithmetic=arithmetic, mask_options=options, shown=name)
            found.append(run)
    return found


def choose(folder: Path, model: str, adapter: Path | None, peft_kind: str = "lora") -> _Profile:
    """Returns the profile for a model: quick for the tiny models, full for others.

    Args:
        folder: the run's folder.
        model: the model's name.
        adapter: the victim's adapter folder; None if the run trains one.
        peft_kind: the kind of the adapter that the run trains.

    Raises:
        ConfigurationError: `adapter` is no PEFT adapter folder, or the full profile is requested for another kind than
            lora.
    """
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ConfigurationError(f"expected a PEFT adapter folder, got {str(adapter)!r}")
    if model in TINY_MODELS:
        return quick(folder, model, adapter, peft_kind)
    if peft_kind != "lora":
        raise ConfigurationError("the full profile trains LoRA; --peft is for the tiny models")
    return full(folder, model, adapter)


def quick(folder: Path, name: str, adapter: Path | None, peft_kind: str = "lora") -> _Profile:
    """Returns the profile of a tiny random model. All of its layers are recorded, and all adversaries finish within a
    minute."""
    model = models.make(name, folder / "model")
    generator = random.Random(0)  # noqa: S311 - what prompts say, not a mask

    def characters(count: int) -> list[int]:
        low = len(models.SPECIAL)
        return [generator.randrange(low, low + len(models.CHARACTERS)) for _ in range(count)]

    firsts = generator.sample(range(len(models.SPECIAL), len(models.SPECIAL) + 95), 64)
    prompts = [[first, *characters(5)] for first in firsts] + [characters(8) for _ in range(4)]
    job = _job(str(model), adapter, list(models.FACTS), prompts, folder / "truth").model_copy(
        update={
            "train_steps": 150,
            "continued_rows": len(models.FACTS),
            "learning_rate": 5e-3,
            "peft_kind": peft_kind,
            "peft": _peft(name, peft_kind),
            "num_threads": 1,  # with two threads, which mostly wait for each other, training took 13 times the work
        }
    )
    return _Profile("quick", str(model), job, None, "1GiB")


def _peft(model: str, kind: str) -> dict[str, Any]:
    """Returns PEFT's options for LoRA on all linear layers, or for another method on a few layers. OFT and BOFT change
    the inputs of these layers. IA3 changes the input of the last layer of each MLP, and the outputs of the others."""
    llama = model == "tiny-llama"
    if kind == "lora":
        return {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}
    if kind == "ia3":
        last = ["down_proj"] if llama else ["mlp.c_proj"]
        return {"target_modules": last + (["k_proj", "v_proj"] if llama else ["c_attn"]), "feedforward_modules": last}
    blocks = {"oft_block_size": 8} if kind == "oft" else {"boft_block_size": 8}
    return {"target_modules": ["q_proj", "v_proj"] if llama else ["c_attn"], **blocks}


def full(folder: Path, model: str, adapter: Path | None) -> _Profile:
    """Returns the profile of a real model, all of whose layers are recorded. The prompts have enough tokens for the
    closed forms of o_proj, v_proj and down_proj.

    With SmolLM2, a token causes 2 MB of traffic, half of which is requests. The closed forms hold all requests in
    memory.
    """
    rows = [json.loads(line) for line in _FACTS.read_text(encoding="utf-8").splitlines()]
    generator = random.Random(0)  # noqa: S311 - what prompts say, not a mask
    prompts = [[generator.randrange(*_TOKEN_IDS) for _ in range(_PROMPT_TOKENS)] for _ in range(_NUM_PROMPTS)]
    job = _job(model, adapter, rows, prompts, folder / "truth").model_copy(
        update={
            "peft": {"r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "o_proj", "down_proj"]},
            "train_steps": 80,
            "traffic_steps": 1,
            "traffic_rows": 2,
            "num_answered": 0,
            "watched": True,
            "questions": [row["messages"][0]["content"] for row in rows[:_NUM_QUESTIONS]],
        }
    )
    return _Profile("full", model, job, None, "24GiB")


def _job(
    model: str, adapter: Path | None, rows: Sequence[dict[str, Any]], prompts: list[list[int]], truth: Path
) -> Job:
    return Job(
        model=model, adapter=adapter, rows=list(rows), train_steps=60, traffic_steps=2, traffic_rows=8,
        learning_rate=1e-3, batch_size=8, peft_kind="lora", peft={}, prompts=prompts, questions=[],
        num_answered=4, answer_tokens=8, truth=truth,
    )  # fmt: skip
