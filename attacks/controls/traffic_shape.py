"""Runs `traffic-shape` on messages of zeros with known row counts, because the adversary reads only metadata.

The control also uses real traffic of adapters of each kind, which attacks/controls/peft_traffic.py trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from attacks.adversaries.traffic_shape import (
    ADVERSARY,
    BOFT,
    IA3,
    KIND,
    LORA,
    LOWEST,
    NORMS,
    OFT,
    PREFIX,
)
from attacks.controls import peft_traffic
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import manifest, no_model
from attacks.seen.adversary import StolenFact
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from attacks.victim.synthetic import Exchange, write_recording

NUM_GROUPS = 4
PROMPTS = ((7, 1), (12, 5), (3, 2))
"""The number of prompt tokens and the number of answer tokens of each prompt."""
STEPS = (96, 64)
"""The number of rows of each training step."""


def control() -> ControlResult:
    """Computes the share of facts that the adversary claims correctly, over messages of zeros and over adapters that a
    real tenant trains at a real provider."""
    right = total = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, changes_inputs in enumerate((False, True)):
            got = claimed(record(Path(scratch) / str(number), changes_inputs), no_model())
            wanted = facts(changes_inputs)
            right += sum(got.get(name) == value for name, value in wanted.items())
            total += len(wanted)
        site = peft_traffic.Site(Path(scratch))
        for name in peft_traffic.CHOSEN:
            example = peft_traffic.LLAMA[name]
            here = peft_traffic.right_facts(example, claimed(site.view(example), site.public))
            right, total = right + here[0], total + here[1]
    setting = f"rows of zeros, and {len(peft_traffic.CHOSEN)} real adapters"
    return ControlResult(ADVERSARY.name, setting, "share of right facts", right / total, 1.0, smaller_wins=False)


def claimed(view: View, model: PublicModel) -> Mapping[str, object]:
    """Returns the value of each claim of the adversary about a view, by the claim's name."""
    claims = ADVERSARY.attack(view, model, None)
    return {claim.name: claim.value for claim in claims if isinstance(claim, StolenFact)}


def facts(changes_inputs: bool) -> Mapping[str, object]:
    """Returns the true facts about the traffic of `record`, by name. There are few facts, because each group has one
    layer and the adversary gets a model without norms."""
    return {
        "prompt tokens": ",".join(str(given + answered - 1) for given, answered in PROMPTS),
        "answer tokens": ",".join(str(answered) for _, answered in PROMPTS),
        LOWEST: ("l0", "l1") if changes_inputs else ("l1", "l2", "before l2"),
        KIND: (IA3, OFT, BOFT) if changes_inputs else (LORA, IA3, OFT, BOFT, PREFIX, NORMS),
        "training rows per step": ",".join(map(str, STEPS)),
    }


def record(folder: Path, changes_inputs: bool, checkpointing: bool = False) -> View:
    """Records messages of training and then of inference with an adapter on layer group 1. There are gradients of the
    group's input only if the adapter changes that input.

    Args:
        folder: the folder to make.
        changes_inputs: whether group 1 is requested twice, as if two of its layers had different inputs.
        checkpointing: whether the upper two groups, then the lower two, are computed again before their gradients.
    """
    calls = [0, 1, 1, 2, 3] if changes_inputs else [0, 1, 2, 3]
    backward = [3, 2, 1, 1] if changes_inputs else [3, 2]
    exchanges: list[Exchange] = []
    for rows in STEPS:
        exchanges += _messages(calls, rows)
        if checkpointing:
            for part in ((2, 3), (0, 1)):
                exchanges += _messages([group for group in calls if group in part], rows)
                exchanges += _messages([group for group in backward if group in part], rows, "backward")
        else:
            exchanges += _messages(backward, rows, "backward")
    for given, answered in PROMPTS:
        for rows in (given, *[1] * (answered - 1)):
            exchanges += _messages(calls, rows)
    return write_recording(folder, manifest(*[2] * NUM_GROUPS), exchanges)


def _messages(groups: Sequence[int], num_rows: int, direction: str = "forward") -> list[Exchange]:
    nothing = torch.zeros(num_rows, 2, dtype=torch.int32)
    return [Exchange(group, nothing, nothing.clone(), direction) for group in groups]
