"""Messages put back together: which belong to one forward pass, and which passes to one prompt with its answer.

Guarantees: uses the view alone: groups come in the order of the manifest, so a step back begins another pass; a pass
of one row goes on with the prompt before it, since a KV cache makes decode steps of one row. It guesses wrong where
several prompts of one tenant run at once: attack a recording of one stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attacks.view import Message, View


@dataclass(frozen=True)
class Pass:
    """One forward pass, and the backward pass that followed it if one did.

    Attributes:
        forward, backward: group id to message; a group that was asked for several times (IA3, OFT) by its first.
    """

    forward: Mapping[int, Message]
    backward: Mapping[int, Message]

    @property
    def num_rows(self) -> int:
        """Tokens, over the whole batch."""
        return next(iter(self.forward.values())).num_rows if self.forward else 0

    @property
    def is_training(self) -> bool:
        """Whether a backward pass followed."""
        return bool(self.backward)


def passes(view: View) -> list[Pass]:
    """All passes of one tenant's view, in order."""
    only_group = len({message.group for message in view.select("product")}) == 1
    found: list[Pass] = []
    forward: dict[int, Message] = {}
    backward: dict[int, Message] = {}
    last = -1
    for message in view.select("product"):
        if message.direction == "backward":
            backward.setdefault(message.group, message)
            continue
        if forward and (backward or message.group < last or (only_group and message.group == last)):
            found.append(Pass(forward, backward))
            forward, backward = {}, {}
        last = message.group
        forward.setdefault(message.group, message)
    if forward or backward:
        found.append(Pass(forward, backward))
    return found


@dataclass(frozen=True)
class Prompt:
    """One prompt and its answer as rows: what each group was given, token after token.

    Attributes:
        number: its place among the view's prompts, as in `places`.
        rows: group id to float64, shape (num_tokens, in_features).
    """

    number: int
    rows: Mapping[int, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together, without the last token, which no layer was given."""
        return next(iter(self.rows.values())).shape[0]


Opened = Mapping[int, torch.Tensor]
"""seq of a message to its unmasked request rows, float64: what an adversary that opens a mask hands on."""


def places(view: View) -> dict[int, tuple[int, int]]:
    """Where each message of inference traffic stands: seq to (place in `prompts`, first token there)."""
    found: dict[int, tuple[int, int]] = {}
    number, start = -1, 0
    for one in passes(view):
        if one.is_training:
            continue
        if one.num_rows > 1 or number < 0:
            number, start = number + 1, 0
        found.update((message.seq, (number, start)) for message in one.forward.values())
        start += one.num_rows
    return found


def prompts(view: View, opened: Opened | None = None) -> list[Prompt]:
    """Inference traffic as prompts; passes that were trained on are left out.

    Args:
        view: one tenant's.
        opened: rows to take in place of the recorded ones; messages that are not in it are left out.
    """
    where = places(view)
    found: dict[int, dict[int, list[torch.Tensor]]] = {}
    for message in view.select("product", "forward"):
        if message.seq not in where or (opened is not None and message.seq not in opened):
            continue
        rows = message.request() if opened is None else opened[message.seq]
        groups = found.setdefault(where[message.seq][0], {})
        groups.setdefault(message.group, []).append(rows.to(torch.float64))
    return [
        Prompt(number, {group: torch.cat(parts) for group, parts in groups.items()})
        for number, groups in sorted(found.items())
    ]
