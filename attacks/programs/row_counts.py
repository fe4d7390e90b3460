"""Measures hostile bundles, with which a provider makes the number of rows depend on a text. No mask hides row counts.

A bundle is the model's files, such as the tokenizer, that a provider sends to a tenant. Each bundle is tried on prompts
of one length, which an honest tokenizer splits into the same number of tokens, and on data sets of one shape. The
result is the entropy of the row counts over equally likely secrets. This is the number of bits that a provider learns
from one prompt, or one data set, by counting rows.

Two bundles break the limits that a tenant sets (docs/threat-model.md, "Row counts"). They must win on a stock
tokenizer, which is the control, and learn nothing from a tenant. The third bundle keeps to every limit. Its tokenizer
is made of allowed components, its template puts contents at allowed positions, and its vocabulary and splitting rule
contain a list of guesses. A provider that chooses the vocabulary can always do this. The fourth bundle makes the
tokenizer fail on some guesses, so that a run that ends early shows which guess was right.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.programs.providers import HostileBundle, tenant_of
from attacks.report.stages import say
from attacks.victim import models
from provider.embedded import serve_in_process
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from wire.errors import VeilbaseError

NUM_SECRETS = 16
PROMPTS = tuple(f"the pin is {number:02d}" for number in range(NUM_SECRETS))
DATA = tuple(
    ({"prompt": f"the pin? {number:02d}", "completion": " yes"}, {"prompt": "who?", "completion": " A"})
    for number in range(NUM_SECRETS)
)
"""PROMPTS and DATA are the secrets. All prompts have the same length, and so have all data sets, so that an honest
tokenizer makes the same number of tokens."""
BUCKET_TOKENS = 64
_FILLER = "~"
_NEW_TOKENS = 2


@dataclass(frozen=True)
class Leak:
    """Holds the result of one bundle against one defence.

    Attributes:
        bundle: the name of the hostile bundle.
        defence: `stock tokenizer` for the control without any limit, otherwise the setting of the tenant.
        job: `prompts` or `training`.
        bits: the entropy of the row counts over the secrets, at most log2 of NUM_SECRETS.
        refused: whether the tenant refused the bundle and sent nothing.
    """

    bundle: str
    defence: str
    job: str
    bits: float
    refused: bool


def _reading_template(bundle: HostileBundle) -> None:
    """Sets a chat template that adds as many spaces as the number at the end of the prompt."""
    bundle.files["chat_template.jinja"] = (
        b"{% for m in messages %}{{ m['content'] }}{% for c in '0123456789abcdef' %}{% if m['content'][-2:] | int == "
        b"loop.index0 %}{{ ' ' * loop.index0 }}{% endif %}{% endfor %}{% endfor %}"
    )


def _spelling_normalizer(bundle: HostileBundle) -> None:
    """Sets a normalizer that replaces each guess by spaces. The number of spaces tells which guess it was."""
    guesses = [
        {"type": "Replace", "pattern": {"String": f" {number:02d}"}, "content": " " * (number + 1)}
        for number in range(NUM_SECRETS)
    ]
    bundle.change_json("tokenizer.json", normalizer={"type": "Sequence", "normalizers": guesses})


def _guessing_vocabulary(bundle: HostileBundle) -> None:
    """Sets a chat template that adds filler characters, and a splitting rule that merges each guess with a different
    number of them into one token. Both keep to all limits."""
    tokenizer = json.loads(bundle.files["tokenizer.json"])
    guesses = [f"{number:02d}{_FILLER}{{{number}}}" for number in range(NUM_SECRETS)]
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "|".join([*guesses, r"[\s\S]"])}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    bundle.files["tokenizer.json"] = json.dumps(tokenizer).encode()
    filler = _FILLER * NUM_SECRETS
    bundle.files["chat_template.jinja"] = (
        "{% for m in messages %}{{ m['content'] }}" + filler + "{% endfor %}"
    ).encode()


def _word_vocabulary(bundle: HostileBundle) -> None:
    """Sets a splitting rule for texts without a template. The rule merges each guess with one to nine of the characters
    before it into one token; how many depends on the guess."""
    tokenizer = json.loads(bundle.files["tokenizer.json"])
    before = "the pin? "
    guesses = [re.escape(f"{before[number % len(before) :]}{number:02d}") for number in range(NUM_SECRETS)]
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "|".join([*guesses, r"[\s\S]"])}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    bundle.files["tokenizer.json"] = json.dumps(tokenizer).encode()


def _failing_vocabulary(bundle: HostileBundle) -> None:
    """Removes the tokens for the digit 1 and for unknown text, so that the tokenizer fails on the guesses with a 1,
    which are 7 of 16."""
    tokenizer = json.loads(bundle.files["tokenizer.json"])
    tokenizer["model"]["unk_token"] = "missing"  # noqa: S105
    del tokenizer["model"]["vocab"]["1"]
    bundle.files["tokenizer.json"] = json.dumps(tokenizer).encode()


BUNDLES: dict[str, dict[str, Callable[[HostileBundle], None]]] = {
    "a template that reads": {"prompts": _reading_template},
    "a normalizer that spells": {"prompts": _spelling_normalizer, "training": _spelling_normalizer},
    "a vocabulary of guesses, within all bounds": {"prompts": _guessing_vocabulary, "training": _word_vocabulary},
    "a vocabulary that fails, within all bounds": {"prompts": _failing_vocabulary, "training": _failing_vocabulary},
}
OUT_OF_BOUNDS = tuple(BUNDLES)[:2]
WITHIN_BOUNDS = tuple(BUNDLES)[2]
STOCK = "stock tokenizer"
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "tokenizer=": {"tokenizer": True},
    "pad_rows=": {"pad_rows": BUCKET_TOKENS},
}


def is_held_off(leaks: Sequence[Leak]) -> bool:
    """Returns whether every bundle wins on a stock tokenizer, and learns nothing against the defences that promise to
    stop it. `tokenizer=` and `pad_rows=` promise to stop every bundle, and `none` those of OUT_OF_BOUNDS."""
    for leak in leaks:
        if leak.defence == STOCK and leak.bits == 0:
            return False
        is_bounded = leak.defence == "none" and leak.bundle in OUT_OF_BOUNDS
        if (is_bounded or leak.defence in ("tokenizer=", "pad_rows=")) and leak.bits > 0:
            return False
    return True


def entropy_bits(observed: Sequence[Hashable]) -> float:
    """Returns the entropy of equally likely observations, in bits."""
    counts = Counter(observed).values()
    return sum(-count / len(observed) * math.log2(count / len(observed)) for count in counts) + 0.0


def measure(folder: Path) -> list[Leak]:
    """Measures every bundle against every defence, and against a stock tokenizer as the control.

    Args:
        folder: an empty folder.
    """
    model = models.make("tiny-llama", folder / "model")
    served_model = serve_in_process(str(model))
    leaks: list[Leak] = []
    for name, jobs in BUNDLES.items():
        for job, change in jobs.items():
            say(f"row counts, hostile bundle: {name}, {job}")
            bundle = HostileBundle(served_model)
            change(bundle)
            bundle.announce()
            leaks.append(Leak(name, STOCK, job, _stock_bits(bundle, job, folder / "stock" / f"{len(leaks)}"), False))
            for defence, options in DEFENCES.items():
                named = {key: str(model) if key == "tokenizer" else value for key, value in options.items()}
                leaks.append(_against_tenant(name, defence, job, served_model, change, named, folder))
    return leaks


def _stock_bits(bundle: HostileBundle, job: str, folder: Path) -> float:
    """Returns how many bits of the secrets a hostile bundle reads through transformers' own tokenizer, which sets no
    limits."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True)
    for name, data in bundle.files.items():
        (folder / name).write_bytes(data)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def length(text: Any) -> int | None:
        try:
            ids = (
                tokenizer(text)["input_ids"]
                if isinstance(text, str)
                else tokenizer.apply_chat_template(text, return_dict=False)
            )
        except Exception:  # noqa: BLE001 - the tokenizers library raises bare exceptions; the run would end here
            return None
        return len(ids)

    if job == "training":
        texts = [[row["prompt"] + row["completion"] for row in data] for data in DATA]
        return entropy_bits([tuple(map(length, each)) for each in texts])
    if tokenizer.chat_template:
        return entropy_bits([length([{"role": "user", "content": prompt}]) for prompt in PROMPTS])
    return entropy_bits([length(prompt) for prompt in PROMPTS])


def _against_tenant(
    name: str, defence: str, job: str, served_model: ServedModel, change: Callable[[HostileBundle], None],
    options: dict[str, Any], folder: Path,
) -> Leak:  # fmt: skip
    secrets: Sequence[Any] = PROMPTS if job == "prompts" else DATA
    seen: list[Hashable] = []
    refused = 0
    for number, secret in enumerate(secrets):
        bundle = HostileBundle(served_model)
        change(bundle)
        bundle.announce()
        # without a mask: row counts are the same under any
        with tenant_of(bundle, folder / "cache", mask="off", arithmetic="ring", **options) as client:
            try:
                _work(client, job, secret, folder / f"adapter{number}")
            except VeilbaseError:
                refused += 1
        seen.append(tuple(bundle.num_rows))
    nothing_sent = all(one == () for one in seen)
    return Leak(name, defence, job, entropy_bits(seen), refused == len(secrets) and nothing_sent)


def _work(client: TenantClient, job: str, secret: Any, adapter: Path) -> None:
    if job == "prompts":
        client.generate(secret, max_new_tokens=_NEW_TOKENS, fixed_length=True)
        return
    from peft import LoraConfig

    client.finetune(
        list(secret), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]), adapter, max_steps=1,
        batch_size=2, progress=False, resume=False, overwrite=True,
    )  # fmt: skip


def lines(leaks: Sequence[Leak]) -> list[str]:
    """Returns a Markdown table of how many bits each bundle read."""
    table = [
        f"Bits that row counts give away, of {math.log2(NUM_SECRETS):.0f}:",
        "",
        f"| bundle | job | {STOCK} | {' | '.join(DEFENCES)} |",
        "|---|---|---|" + "---|" * len(DEFENCES),
    ]
    for name, jobs in BUNDLES.items():
        for job in jobs:
            cells = {each.defence: each for each in leaks if (each.bundle, each.job) == (name, job)}
            shown = [_cell(cells[defence]) for defence in (STOCK, *DEFENCES)]
            table.append(f"| {name} | {job} | {' | '.join(shown)} |")
    return table


def _cell(leak: Leak) -> str:
    return "refused" if leak.refused else f"{leak.bits:.1f}"
