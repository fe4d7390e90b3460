"""Reassembles messages into forward passes, and forward passes into prompts with their answers.

Only messages with a reply are used. In a pass, groups (layers that read the same input) follow the order of
the manifest, so a step back in that order begins a new pass, and so does a forward message after a backward one. If the
view has messages of one group only, each forward message begins a pass. A pass of one row continues the prompt before
it, since with a KV cache each decode step has one row. If several prompts of one tenant run at once, the result is
wrong. An attack therefore needs a recording in which prompts follow one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from attacks.seen.view import Message, View


@dataclass(frozen=True)
class ForwardPass:
    """Holds one forward pass, and the backward pass that followed it if one did.

    Attributes:
        forward, backward: maps a group id to the group's message. If a group was requested several times (IA3, OFT),
            this is the first message.
        repeats, backward_repeats: maps the id of such a group to its other messages, in order.
    """

    forward: Mapping[int, Message]
    backward: Mapping[int, Message]
    repeats: Mapping[int, tuple[Message, ...]]
    backward_repeats: Mapping[int, tuple[Message, ...]]

    @property
    def num_rows(self) -> int:
        """Returns the number of tokens, over the whole batch; 0 if no forward message was recorded."""
        return next(iter(self.forward.values())).num_rows if self.forward else 0

    @property
    def is_training(self) -> bool:
        """Returns whether a backward pass followed the forward pass."""
        return bool(self.backward)


def forward_passes(view: View) -> list[ForwardPass]:
    """Returns all passes of one tenant's view, in order."""
    only_group = len({message.group for message in view.select("product")}) == 1
    found: list[ForwardPass] = []
    forward, backward, repeats, backward_repeats = _Firsts(), _Firsts(), _Others(), _Others()
    last = -1
    for message in view.select("product"):
        if message.direction == "backward":
            _add(message, backward, backward_repeats)
            continue
        if forward and (backward or message.group < last or (only_group and message.group == last)):
            found.append(ForwardPass(forward, backward, repeats, backward_repeats))
            forward, backward, repeats, backward_repeats = _Firsts(), _Firsts(), _Others(), _Others()
        last = message.group
        _add(message, forward, repeats)
    if forward or backward:
        found.append(ForwardPass(forward, backward, repeats, backward_repeats))
    return found


_Firsts = dict[int, Message]
_Others = dict[int, tuple[Message, ...]]


def _add(message: Message, firsts: _Firsts, others: _Others) -> None:
    if message.group in firsts:
        others[message.group] = (*others.get(message.group, ()), message)
    else:
        firsts[message.group] = message


@dataclass(frozen=True)
class Prompt:
    """Holds one prompt and its answer as rows: the input of each group, token after token.

    Attributes:
        number: the prompt's number among the prompts of the view, in order, from 0.
        rows: maps a group id to the group's input, float64, shape (num_tokens, in_features).
        repeats: maps a group id to the rows of the group's further requests in each pass, which have other inputs.
    """

    number: int
    rows: Mapping[int, torch.Tensor]
    repeats: Mapping[int, tuple[torch.Tensor, ...]]

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that went through the layers: all of the prompt, and all of its answer but the
        last."""
        return next(iter(self.rows.values())).shape[0]


Opened = Mapping[int, torch.Tensor]
"""Maps a message's seq to its unmasked request rows, float64, as found by an adversary that removes a mask."""


def places(view: View) -> dict[int, tuple[int, int]]:
    """Maps the seq of each message of inference to two numbers: the prompt's number in `prompts`, and the position of
    the message's first row in that prompt. If a group was requested several times in a pass, only its first message is
    in the map."""
    found: dict[int, tuple[int, int]] = {}
    number, start = -1, 0
    for one in forward_passes(view):
        if one.is_training:
            continue
        if one.num_rows > 1 or number < 0:
            number, start = number + 1, 0
        found.update((message.seq, (number, start)) for message in one.forward.values())
        start += one.num_rows
    return found


def prompts(view: View, opened: Opened | None = None, only: Collection[int] | None = None) -> list[Prompt]:
    """Returns the prompts of a view's inference traffic, in order. Training passes are left out, and so are prompts
    without any of the wanted rows.

    Args:
        view: the view of one tenant.
        opened: rows to use in place of the recorded ones; messages that are not in `opened` are left out.
        only: groups whose rows are wanted; None reads those of all groups.
    """
    found: list[dict[tuple[int, int], list[torch.Tensor]]] = []
    for one in forward_passes(view):
        if one.is_training:
            continue
        if one.num_rows > 1 or not found:
            found.append({})
        for group, message in one.forward.items():
            if only is not None and group not in only:
                continue
            for place, each in enumerate((message, *one.repeats.get(group, ()))):
                if opened is None or each.seq in opened:
                    rows = each.request() if opened is None else opened[each.seq]
                    found[-1].setdefault((group, place), []).append(rows.to(torch.float64))
    return [_prompt(number, parts) for number, parts in enumerate(found) if parts]


def _prompt(number: int, parts: Mapping[tuple[int, int], list[torch.Tensor]]) -> Prompt:
    rows = {group: torch.cat(several) for (group, place), several in parts.items() if place == 0}
    repeats: dict[int, tuple[torch.Tensor, ...]] = {}
    for (group, place), several in sorted(parts.items(), key=lambda item: item[0]):
        if place:
            repeats[group] = (*repeats.get(group, ()), torch.cat(several))
    return Prompt(number, rows, repeats)
