"""`traffic-shape`: what the order and the row counts of messages say; no tensor is read.

Works under every mask: token counts, layers, directions and timing are not protected, as docs/threat-model.md states.

Token counts need a KV cache, or prompts of more than one token (attacks/passes.py). A pass that does not reach every
group is recomputation under gradient checkpointing and belongs to the training pass before it.

A tenant sends a gradient to a group when the group's input depends on something that is trained. An adapter that adds
to outputs (LoRA) makes that so for the next group up, one that changes inputs (OFT, BOFT, IA3 before feed-forward
layers) for its own: hence `lowest adapted layer`, which names the first layer of a group, not a member of it.

Guesses wrong where a method changes no input that several layers share (OFT of o_proj alone, PEFT's default IA3): its
groups are asked once, as ever, so it passes for LoRA, and OFT of o_proj is placed one group too low. Prompt tuning
passes for an adapter of the first group. Requests that were split at the provider's limit of rows pass for repeated
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attacks.adversary import Adversary, Claim, StolenFact
from attacks.passes import Opened, Pass, passes
from attacks.public_model import PublicModel
from attacks.view import Message, View

CHANGES_INPUTS, ADDS_TO_OUTPUTS = "changes inputs", "adds to outputs"


@dataclass(frozen=True)
class Shape:
    """One pass as metadata: rows of each forward group, and the groups that gradients reached."""

    num_rows: int
    groups: frozenset[int]
    backward: frozenset[int]


def shapes(view: View) -> list[Shape]:
    """All passes of a view, recomputation joined to the pass that it belongs to."""
    found: list[Shape] = []
    everything = {message.group for message in view.select("product", "forward")}
    for one in passes(view):
        shape = Shape(one.num_rows, frozenset(one.forward), frozenset(one.backward))
        if found and shape.groups < everything:
            last = found.pop()
            shape = Shape(last.num_rows, last.groups | shape.groups, last.backward | shape.backward)
        found.append(shape)
    return found


def prompt_lengths(found: Sequence[Shape]) -> list[tuple[int, int]]:
    """(prompt tokens, answer tokens) of each prompt; every forward pass gives one token of an answer."""
    counted: list[tuple[int, int]] = []
    for one in found:
        if one.backward:
            continue
        if one.num_rows > 1 or not counted:
            counted.append((one.num_rows, 1))
        else:
            tokens, answers = counted[-1]
            counted[-1] = (tokens, answers + 1)
    return counted


def repeated_groups(view: View) -> frozenset[int]:
    """Groups that were asked several times in a pass: their members do not read the same input."""
    asked: Counter[tuple[int, int]] = Counter()
    for number, message in _forward_by_pass(view):
        asked[number, message.group] += 1
    return frozenset(group for (_, group), count in asked.items() if count > 1)


def _forward_by_pass(view: View) -> Iterator[tuple[int, Message]]:
    """Forward messages with the number of their pass, by the same rule as `passes`."""
    firsts = [_first_seq(one) for one in passes(view)]
    number = -1
    for message in view.select("product"):
        if number + 1 < len(firsts) and message.seq >= firsts[number + 1]:
            number += 1
        if message.direction == "forward":
            yield number, message


def _first_seq(one: Pass) -> int:
    return min(message.seq for message in (*one.forward.values(), *one.backward.values()))


def lowest_adapted(found: Sequence[Shape], repeated: frozenset[int], groups: Sequence[int]) -> int | None:
    """Group of the lowest adapted layer; None without gradients.

    Args:
        groups: ids that were seen, ascending.
    """
    reached = set().union(*(one.backward for one in found))
    if not reached:
        return None
    lowest = min(reached)
    below = [group for group in groups if group < lowest]
    return lowest if lowest in repeated or not below else below[-1]


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    if opened is not None:
        return []  # opened rows have the shape that was seen before
    found = shapes(view)
    prompts, steps = prompt_lengths(found), [one.num_rows for one in found if one.backward]
    repeated = repeated_groups(view)
    groups = sorted({message.group for message in view.select("product")})
    claims: list[Claim] = []
    if prompts:
        # the last token of an answer is never given to a layer
        claims.append(StolenFact("prompt tokens", _joined(given + answered - 1 for given, answered in prompts)))
        claims.append(StolenFact("answer tokens", _joined(answered for _, answered in prompts)))
    lowest = lowest_adapted(found, repeated, groups)
    if lowest is not None:
        claims.append(StolenFact("lowest adapted layer", view.manifest.groups[lowest].layers[0].name))
    if groups:
        claims.append(StolenFact("PEFT kind", CHANGES_INPUTS if repeated else ADDS_TO_OUTPUTS))
    if steps:
        claims.append(StolenFact("training rows per step", _joined(steps)))
    return claims


def _joined(numbers: Iterator[int] | Sequence[int]) -> str:
    return ",".join(map(str, numbers))


ADVERSARY = Adversary(
    "traffic-shape", "sizes, order and directions alone: lengths, training rows, lowest adapted layer", _attack
)
