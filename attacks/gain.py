"""What a stolen adapter is worth: the private task with the base model, the victim's adapter and the thief's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.truth import adapted_copy

_NUM_ANSWERS = 3


@dataclass(frozen=True)
class Gain:
    """Losses per token of the private answers, and answers that hold the private fact.

    Attributes:
        gain: (base − stolen) / (base − victim), of losses; 1.0 means that the thief has it all.
        agreement: share of answer tokens at which thief and victim would say the same; base_agreement: base and victim.
        answers: a few, of base, victim and thief.
    """

    base_loss: float
    victim_loss: float
    stolen_loss: float
    gain: float
    agreement: float
    base_agreement: float
    answers: tuple[tuple[str, str, str], ...]


def measure(base: Any, victim: Any, stolen: Path, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Gain:
    """Runs the three models on private rows.

    Args:
        base, victim: models of attacks/truth.py.
        stolen: PEFT folder.
        rows: `messages` or `prompt` and `completion`.
    """
    thief = adapted_copy(base, stolen).to(torch.float32)
    base, victim = (copy.deepcopy(model).to(torch.float32) for model in (base, victim))
    encoded = [encode(tokenizer, row) for row in rows]
    losses, agreed, total = [0.0, 0.0, 0.0], [0, 0], 0
    for ids, start in encoded:
        logits = [_logits(model, ids)[start - 1 : -1] for model in (base, victim, thief)]
        labels = torch.tensor(ids[start:])
        for place, one in enumerate(logits):
            losses[place] += float(torch.nn.functional.cross_entropy(one, labels, reduction="sum"))
        for place, one in enumerate((logits[2], logits[0])):
            agreed[place] += int((logits[1].argmax(-1) == one.argmax(-1)).sum())
        total += len(labels)
    base_loss, victim_loss, stolen_loss = (loss / total for loss in losses)
    gain = (base_loss - stolen_loss) / (base_loss - victim_loss) if base_loss != victim_loss else 0.0
    answers = tuple(
        (
            _answer(base, tokenizer, ids[:start], len(ids) - start),
            _answer(victim, tokenizer, ids[:start], len(ids) - start),
            _answer(thief, tokenizer, ids[:start], len(ids) - start),
        )
        for ids, start in encoded[:_NUM_ANSWERS]
    )
    return Gain(base_loss, victim_loss, stolen_loss, gain, agreed[0] / total, agreed[1] / total, answers)


def encode(tokenizer: Any, row: Mapping[str, Any]) -> tuple[list[int], int]:
    """Token ids of a row, and where its answer begins."""
    if "messages" in row:
        messages = list(row["messages"])
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return [*prompt, *tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]], len(prompt)
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return [*prompt, *answer], len(prompt)


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def _answer(model: Any, tokenizer: Any, prompt: list[int], count: int) -> str:
    ids = list(prompt)
    for _ in range(min(count, 24)):
        ids.append(int(_logits(model, ids)[-1].argmax()))
    return str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
