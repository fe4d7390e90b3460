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
_DRAWS, _TAIL = 2000, 0.005


@dataclass(frozen=True)
class Question:
    """One private question.

    Attributes:
        num_tokens: of its answer.
        losses: summed over the answer, of base, victim and thief.
        agreed: tokens at which the thief, and the base model, would say what the victim says.
    """

    num_tokens: int
    losses: tuple[float, float, float]
    agreed: tuple[int, int]


@dataclass(frozen=True)
class Worth:
    """A value with its 99% interval, and what the base model alone gets with the interval of chance around it.

    Intervals are by bootstrap over the questions: few questions make them wide, and too narrow rather than too wide.
    """

    value: float
    spread: tuple[float, float]
    baseline: float
    by_chance: tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """What the private questions show.

    Attributes:
        answers: a few, of base, victim and thief.
    """

    questions: tuple[Question, ...]
    answers: tuple[tuple[str, str, str], ...]

    @property
    def gain(self) -> Worth:
        """(base − stolen) / (base − victim), of losses per token; 1.0 means that the thief has it all."""
        losses = torch.tensor([one.losses for one in self.questions], dtype=torch.float64)
        return _worth(losses[:, 0] - losses[:, 2], losses[:, 0] - losses[:, 1], torch.zeros(len(losses)))

    @property
    def agreement(self) -> Worth:
        """Share of answer tokens at which thief and victim would say the same; the baseline is base and victim."""
        agreed = torch.tensor([one.agreed for one in self.questions], dtype=torch.float64)
        sizes = torch.tensor([one.num_tokens for one in self.questions], dtype=torch.float64)
        return _worth(agreed[:, 0], sizes, agreed[:, 1])


def _worth(stolen: torch.Tensor, sizes: torch.Tensor, base: torch.Tensor) -> Worth:
    """Ratios of sums over questions, which are drawn again and again with replacement.

    By chance a thief is as good as the base model, up to what the same draws move the difference of the two.

    Args:
        stolen, sizes, base: shape (num_questions,).
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(sizes), (_DRAWS, len(sizes)), generator=generator)

    def ratio(parts: torch.Tensor) -> tuple[float, torch.Tensor]:
        if not float(sizes.sum()):
            return 0.0, torch.zeros(_DRAWS, dtype=torch.float64)
        again = parts[drawn].sum(1) / sizes[drawn].sum(1)
        return float(parts.sum() / sizes.sum()), again[again.isfinite()]

    value, values = ratio(stolen)
    baseline, _ = ratio(base.to(torch.float64))
    difference, differences = ratio(stolen - base)
    low, high = _quantiles(differences - difference)
    return Worth(value, _quantiles(values), baseline, (baseline + low, baseline + high))


def _quantiles(values: torch.Tensor) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    low, high = torch.quantile(values, torch.tensor([_TAIL, 1 - _TAIL], dtype=torch.float64)).tolist()
    return low, high


def measure(base: Any, victim: Any, stolen: Path, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> Gain:
    """Runs the three models on private rows.

    Args:
        base, victim: models of attacks/truth.py.
        stolen: PEFT folder.
        rows: `messages` or `prompt` and `completion`.
    """
    thief = adapted_copy(base, stolen).to(torch.float32)
    base, victim = (copy.deepcopy(model).to(torch.float32) for model in (base, victim))
    models = (base, victim, thief)
    encoded = [encode(tokenizer, row) for row in rows]
    answers = []
    for ids, start in encoded[:_NUM_ANSWERS]:
        said = [_answer(model, tokenizer, ids[:start], len(ids) - start) for model in models]
        answers.append((said[0], said[1], said[2]))
    return Gain(tuple(_ask(models, ids, start) for ids, start in encoded), tuple(answers))


def _ask(models: tuple[Any, Any, Any], ids: list[int], start: int) -> Question:
    """Args: models: base, victim and thief; start: of the answer in `ids`."""
    base, victim, thief = (_logits(model, ids)[start - 1 : -1] for model in models)
    labels = torch.tensor(ids[start:])
    losses = [float(torch.nn.functional.cross_entropy(one, labels, reduction="sum")) for one in (base, victim, thief)]
    agreed = [int((victim.argmax(-1) == one.argmax(-1)).sum()) for one in (thief, base)]
    return Question(len(labels), (losses[0], losses[1], losses[2]), (agreed[0], agreed[1]))


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
