"""Writes a stolen adapter as a PEFT LoRA adapter, and measures what it is worth on private questions.

Unmodified PEFT loads what is written, so that anyone can check what was stolen. The claimed ΔW of a layer is reduced to
at most MAX_RANK leading singular vectors. Layers without a usable claim (finite and not zero) are left out. The stolen
model is compared with the base model and with the victim.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from attacks.seen.adversary import StolenDelta
from attacks.seen.public_model import PublicModel
from attacks.truth.secrets import adapted_copy

MAX_RANK = 64
_NOISE = 1e-6
"""Singular values below this share of a layer's largest one are rounding."""


def write_adapter(claims: Iterable[StolenDelta], public: PublicModel, folder: Path) -> Path | None:
    """Writes the claimed adapter as a PEFT folder.

    Args:
        claims: claims about any layers; a later claim about a layer replaces an earlier one.
        public: the public model, which gives the columns of a fused layer's members.
        folder: the folder to write to; it is made if it is missing.

    Returns:
        `folder`; None, without writing anything, if no claim is usable.
    """
    from peft import LoraConfig

    deltas = _by_module({claim.layer: claim.delta for claim in claims}, public)
    factors = {name: factor for name, delta in deltas.items() if (factor := _factors(delta)) is not None}
    if not factors:
        return None
    rank = max(down.shape[1] for down, _ in factors.values())
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=sorted(factors), task_type="CAUSAL_LM", inference_mode=True,
        fan_in_fan_out=public.style == "gpt2",
    )  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for name, (down, up) in factors.items():
        a, b = torch.zeros(rank, down.shape[0]), torch.zeros(up.shape[1], rank)
        a[: down.shape[1]], b[:, : up.shape[0]] = down.t().float(), up.t().float()
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _by_module(deltas: Mapping[str, torch.Tensor], public: PublicModel) -> dict[str, torch.Tensor]:
    """Joins the parts of a fused layer side by side, and returns ΔW by module name. A part without a claim is zero."""
    layers: Mapping[str, Any] = public.layers()
    whole: dict[str, torch.Tensor] = {}
    for name, delta in deltas.items():
        module, _, part = name.partition("[")
        if not part:
            whole[module] = delta
            continue
        width = layers[name].weight.shape[1]
        fused = whole.setdefault(module, torch.zeros(delta.shape[0], 3 * width, dtype=delta.dtype))
        start = "qkv".index(part[0]) * width
        fused[:, start : start + width] = delta
    return whole


def _factors(delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns ΔW ≈ down · up as two factors, (in_features, rank) and (rank, out_features); None if ΔW is zero
    or not finite."""
    if not bool(torch.isfinite(delta).all()) or not bool(delta.any()):
        return None
    u, sizes, vh = torch.linalg.svd(delta, full_matrices=False)
    rank = min(MAX_RANK, int((sizes > sizes[0] * _NOISE).sum()))
    root = sizes[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]


_NUM_ANSWERS, _MAX_ANSWER = 3, 24
_DRAWS, _TAIL = 2000, 0.005


@dataclass(frozen=True)
class Question:
    """Holds the results of one private question.

    Attributes:
        num_tokens: the number of tokens of the question's answer.
        losses: the losses of base model, victim and stolen adapter, each summed over the answer, in nats.
        divergences: KL divergences of stolen adapter and base model from the victim's distribution, summed over the
            answer, in nats.
        agreed: at how many tokens of the answer the stolen adapter, and the base model, would choose the same token as
            the victim.
    """

    num_tokens: int
    losses: tuple[float, float, float]
    agreed: tuple[int, int]
    divergences: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Worth:
    """Holds a value of the stolen adapter with its 99% interval, and the base model's value with an interval of chance
    around it.

    Intervals come from a bootstrap over the questions. With few questions the intervals are wide, but even so they tend
    to be too narrow.
    """

    value: float
    spread: tuple[float, float]
    baseline: float
    by_chance: tuple[float, float]


@dataclass(frozen=True)
class Gain:
    """Holds the results of all private questions.

    Attributes:
        questions: the results of each question.
        answers: the first few answers of base model, victim and stolen adapter, as text.
    """

    questions: tuple[Question, ...]
    answers: tuple[tuple[str, str, str], ...]

    @property
    def gain(self) -> Worth:
        """Returns (base − stolen) / (base − victim), where the three are losses per token. A value of 1.0 means that
        the stolen adapter has all of the victim's gain."""
        losses = torch.tensor([one.losses for one in self.questions], dtype=torch.float64)
        return _worth(losses[:, 0] - losses[:, 2], losses[:, 0] - losses[:, 1], torch.zeros(len(losses)))

    @property
    def agreement(self) -> Worth:
        """Returns the share of answer tokens at which the stolen adapter would choose the same token as the victim. The
        baseline compares the base model with the victim."""
        agreed = torch.tensor([one.agreed for one in self.questions], dtype=torch.float64)
        sizes = torch.tensor([one.num_tokens for one in self.questions], dtype=torch.float64)
        return _worth(agreed[:, 0], sizes, agreed[:, 1])

    @property
    def divergence(self) -> Worth:
        """Returns the KL divergence of the stolen adapter's next-token distribution from the victim's, in nats per
        token. The baseline is the divergence of the base model's distribution from the victim's."""
        divergences = torch.tensor([one.divergences for one in self.questions], dtype=torch.float64)
        sizes = torch.tensor([one.num_tokens for one in self.questions], dtype=torch.float64)
        return _worth(divergences[:, 0], sizes, divergences[:, 1])


def _worth(stolen: torch.Tensor, sizes: torch.Tensor, base: torch.Tensor) -> Worth:
    """Computes Σ stolen / Σ sizes as the value, and Σ base / Σ sizes as the baseline; both are 0 if Σ sizes is 0. The
    intervals come from a bootstrap, which draws questions with replacement.

    The interval of chance is where a stolen adapter that is as good as the base model would lie. Its width is the
    spread, over the same draws, of the difference between stolen adapter and base model.

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


@dataclass(frozen=True)
class _Said:
    """Holds the answers of one model to private questions.

    Attributes:
        losses: the loss of each right answer, summed over its tokens, in nats.
        log_probabilities: for each answer, float32, shape (num_tokens, vocabulary).
        answers: the text that the model itself generates for the first questions.
    """

    losses: tuple[float, ...]
    log_probabilities: tuple[torch.Tensor, ...]
    answers: tuple[str, ...]


class PrivateTask:
    """Holds private questions with the results of base model and victim, computed once for all stolen adapters."""

    def __init__(self, base: Any, victim: Any, tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        """Encodes the questions and their answers as token ids.

        Args:
            base, victim: the base model and the victim's model, made by attacks/truth/secrets.py.
            tokenizer: transformers' tokenizer of both models.
            rows: the questions, each with `messages` or with `prompt` and `completion`.
        """
        self._base, self._victim, self._tokenizer = base, victim, tokenizer
        self._encoded = [encode(tokenizer, row) for row in rows]

    @functools.cached_property
    def _before(self) -> tuple[_Said, _Said]:
        base, victim = (self._hear(copy.deepcopy(model)) for model in (self._base, self._victim))
        return base, victim

    def measure(self, stolen: Path) -> Gain:
        """Measures what the adapter in a PEFT folder is worth, in float32.

        Raises:
            ConfigurationError: the adapter does not fit the model.
        """
        base, victim = self._before
        thief = self._hear(adapted_copy(self._base, stolen))
        questions = [
            Question(
                len(ids) - start,
                (base.losses[place], victim.losses[place], thief.losses[place]),
                (_agreed(victim, thief, place), _agreed(victim, base, place)),
                (_divergence(victim, thief, place), _divergence(victim, base, place)),
            )
            for place, (ids, start) in enumerate(self._encoded)
        ]
        return Gain(tuple(questions), tuple(zip(base.answers, victim.answers, thief.answers, strict=True)))

    def _hear(self, model: Any) -> _Said:
        """Computes the losses, the distributions and the answers of one model on the questions.

        Args:
            model: the model; it is changed in place.
        """
        model = model.to(torch.float32)
        losses, found = [], []
        for ids, start in self._encoded:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
            losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum")))
            found.append(logits.log_softmax(-1))
        asked = self._encoded[:_NUM_ANSWERS]
        answers = [_answer(model, self._tokenizer, ids[:start], len(ids) - start) for ids, start in asked]
        return _Said(tuple(losses), tuple(found), tuple(answers))


def _agreed(one: _Said, other: _Said, place: int) -> int:
    choices = (said.log_probabilities[place].argmax(-1) for said in (one, other))
    return int(torch.eq(*choices).sum())


def _divergence(victim: _Said, other: _Said, place: int) -> float:
    given, wanted = other.log_probabilities[place], victim.log_probabilities[place]
    return float(torch.nn.functional.kl_div(given, wanted, log_target=True, reduction="sum"))


def encode(tokenizer: Any, row: Mapping[str, Any]) -> tuple[list[int], int]:
    """Returns the token ids of a row, and the position at which its answer begins."""
    if "messages" in row:
        messages = list(row["messages"])
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        return [*prompt, *tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]], len(prompt)
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    return [*prompt, *answer], len(prompt)


def _answer(model: Any, tokenizer: Any, prompt: list[int], count: int) -> str:
    """Generates `count` tokens greedily, but at most _MAX_ANSWER. The model's `generate` is not used, because it could
    end earlier."""
    given, past, answer = prompt, None, []
    for _ in range(min(count, _MAX_ANSWER)):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
        given, past = [int(output.logits[0, -1].argmax())], output.past_key_values
        answer += given
    return str(tokenizer.decode(answer, skip_special_tokens=True))
