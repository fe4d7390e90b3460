"""Implements `traffic-shape`, which reads facts from the order and row counts of messages, but not from tensors or
times.

The attack works under every mask, because token counts, layers and directions are not protected (docs/threat-model.md,
"What every provider sees").

Token counts are right if the tenant uses a KV cache and every prompt has more than one token
(attacks/seen/forward_passes.py). The rows of a soft prompt count as tokens. A pass that does not reach every group
(layers that read the same input) is taken for a recomputation under gradient checkpointing, and joined to the training
pass before it.

A tenant sends the gradients of a group if the group's input depends on a trained parameter. A method that adds to
outputs (LoRA) causes this for the next higher group. A method that changes inputs (OFT, BOFT, IA3 before feed-forward
layers) causes it for its own group. Layers of a group share a call only if they read the same input. So changed inputs
cause further calls, and the number of calls shows which layers may be changed. If several kinds of adapter cause the
same traffic, the claim lists all these kinds and does not choose the likeliest. OFT and BOFT always look the same. LoRA
and an IA3 that scales outputs also look the same. All training of a view is assumed to be of one kind.

`client.finetune` computes logits of all positions for soft prompts and prefixes only. The output head's row count shows
this if the provider has the head. Other trainers always compute all logits. A conclusion that assumes `client.finetune`
is therefore a separate claim.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from attacks.seen.adversary import Adversary, Claim, StolenFact
from attacks.seen.forward_passes import ForwardPass, Opened, forward_passes
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View
from wire.manifest import Manifest

LORA, IA3, OFT, BOFT = "LoRA", "IA3", "OFT", "BOFT"
PROMPT, P_TUNING, PREFIX = "prompt tuning", "P-tuning", "prefix tuning"
NORMS, EMBEDDINGS = "norm tuning", "trained embeddings"
KINDS = (LORA, IA3, OFT, BOFT, PROMPT, P_TUNING, PREFIX, NORMS, EMBEDDINGS)
"""The kinds of adapter that claims name. LoRA stands for every method that adds to a layer's output."""
KIND, KIND_IF_FINETUNE = "PEFT kind", "PEFT kind, if client.finetune trained it"
LOWEST, MEMBERS = "lowest adapted layer", "layers with changed inputs"
_CHANGES_INPUTS = (IA3, OFT, BOFT)
_LEARNS_PROMPTS = (PROMPT, P_TUNING, PREFIX)


@dataclass(frozen=True)
class _Shape:
    """Holds the metadata of one pass.

    Attributes:
        num_rows: the number of tokens, over the whole batch.
        calls, backward: maps a group id to the number of forward or backward calls with all rows of the pass. A call
            that was split into several requests counts once.
        head_rows: the rows of the output head; None if the head stays with the tenant.
    """

    num_rows: int
    calls: Mapping[int, int]
    backward: Mapping[int, int]
    head_rows: int | None


@dataclass(frozen=True)
class Training:
    """Holds what the training passes of a view show together.

    Attributes:
        groups: the ids of all groups that were seen, ascending.
        lowest: the lowest group of which a gradient was sent; None if no gradients were sent.
        repeated: the groups that were requested several times in one pass, because their layers do not all read the
            same input.
        has_few_logits: whether the head was given fewer rows than there were tokens in a training pass; None if no
            head was seen.
    """

    groups: tuple[int, ...]
    lowest: int | None
    repeated: frozenset[int]
    has_few_logits: bool | None

    @property
    def below(self) -> int | None:
        """Returns the id of the group just below the lowest group of which a gradient was sent; None if there is
        none."""
        lower = [group for group in self.groups if self.lowest is not None and group < self.lowest]
        return lower[-1] if lower else None


def _shapes(view: View, head_group: int | None = None) -> list[_Shape]:
    """Returns all passes of a view; a recomputation is joined to the pass that it belongs to."""
    found: list[_Shape] = []
    everything = {message.group for message in view.select("product", "forward")}
    for one in forward_passes(view):
        shape = _shape(one, head_group)
        found.append(_joined(found.pop(), shape) if found and set(shape.calls) < everything else shape)
    return found


def _shape(one: ForwardPass, head_group: int | None) -> _Shape:
    forward = _rows(one.forward, one.repeats)
    backward = _rows(one.backward, one.backward_repeats)
    head_rows = forward.get(head_group) if head_group is not None else None
    counted = Counter(rows for group, rows in (forward or backward).items() if group != head_group)
    # most groups are requested once per pass; if two row counts are equally frequent, the larger one is a multiple
    tokens = min((rows for rows, count in counted.items() if count == max(counted.values())), default=one.num_rows)
    calls, gradients = (
        {group: 1 if group == head_group else max(1, round(rows / max(1, tokens))) for group, rows in each.items()}
        for each in (forward, backward)
    )
    return _Shape(tokens, calls, gradients, head_rows)


def _rows(first: Mapping[int, Message], repeats: Mapping[int, tuple[Message, ...]]) -> dict[int, int]:
    return {
        group: message.num_rows + sum(other.num_rows for other in repeats.get(group, ()))
        for group, message in first.items()
    }


def _joined(one: _Shape, more: _Shape) -> _Shape:
    """Returns the shape of a pass joined with its recomputation: recomputed calls are not counted again, while
    gradients are added up."""
    groups = {*one.calls, *more.calls}
    calls = {group: max(one.calls.get(group, 0), more.calls.get(group, 0)) for group in groups}
    backward = dict(Counter(one.backward) + Counter(more.backward))
    return _Shape(one.num_rows, calls, backward, one.head_rows)


def _prompt_lengths(found: Sequence[_Shape]) -> list[tuple[int, int]]:
    """Returns, for each prompt, the number of prompt tokens and of answer tokens. Every forward pass gives one token of
    an answer."""
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


def _summarise(view: View, found: Sequence[_Shape]) -> Training:
    """Returns what a view's traffic shows about training. All claims about the adapter are based on these facts."""
    groups = tuple(sorted({message.group for message in view.select("product")}))
    steps = [one for one in found if one.backward]
    reached = {group for one in steps for group in one.backward}
    repeated = frozenset(group for one in found for group, count in one.calls.items() if count > 1)
    heads = [one.head_rows < one.num_rows for one in steps if one.head_rows is not None]
    return Training(groups, min(reached, default=None), repeated, any(heads) if heads else None)


def kinds(seen: Training, manifest: Manifest, model: PublicModel) -> tuple[str, ...]:
    """Returns all kinds of adapter that could have caused this traffic with any trainer, in the order of KINDS. These
    are all kinds if there were neither gradients nor repeated requests for a group."""
    if seen.repeated:
        return _CHANGES_INPUTS  # several layers share a group, so the model is no GPT-2
    if seen.lowest is None:
        return KINDS
    could: set[str] = set()
    if seen.below is not None:
        could |= {LORA, IA3}
    if len(manifest.groups[seen.lowest].layers) == 1:  # with several layers, changed inputs cause further calls
        could |= set(_CHANGES_INPUTS)
    if seen.below is None:
        could |= {PROMPT, P_TUNING, NORMS, EMBEDDINGS}
    if not model.blocks or seen.lowest == model.blocks[0].o.group:
        could.add(PREFIX)
    if not model.blocks or seen.lowest in _normed(model):
        could.add(NORMS)
    if seen.has_few_logits:
        could -= set(_LEARNS_PROMPTS)
    if model.style == "gpt2":
        could -= {OFT, BOFT}  # PEFT does not support them on a Conv1D
    return tuple(kind for kind in KINDS if kind in could)


def _normed(model: PublicModel) -> set[int | None]:
    """Returns the groups whose input comes from a norm layer; None is among them if the output head is the tenant's."""
    return {model.head_group, *(layer.group for block in model.blocks for layer in (block.q, block.up[0]))}


def _if_finetune(could: Sequence[str], seen: Training) -> tuple[str, ...]:
    """Returns the kinds of adapter in `could` for which `client.finetune` would send as many rows to the output head as
    were seen: some positions or all. Returns all of `could` if the provider does not have the head."""
    if seen.has_few_logits is None:
        return tuple(could)
    return tuple(kind for kind in could if (kind in _LEARNS_PROMPTS) != seen.has_few_logits)


def _lowest_adapted(
    seen: Training, could: Sequence[str], found: Sequence[_Shape], manifest: Manifest
) -> tuple[str, ...]:
    """Returns the first layers of the groups that may hold the lowest adapted layer. The result is empty if no gradient
    was sent. An entry `before L` means that the adapter may change something before layer L that is not a base layer,
    such as a norm."""
    if seen.lowest is None:
        return ()
    own = manifest.groups[seen.lowest].layers
    names = [] if seen.below is None else [manifest.groups[seen.below].layers[0].name]
    if seen.lowest in seen.repeated:
        # if a call has no gradient, its input depends on no trained parameter, so no trained parameter is below
        unchanged = any(one.backward[seen.lowest] < one.calls[seen.lowest] for one in _reaching(found, seen.lowest))
        return (own[0].name,) if unchanged else (*names, own[0].name)
    if not {LORA, IA3} & set(could):
        names = []
    if len(own) == 1 and {OFT, BOFT, IA3} & set(could):
        names.append(own[0].name)
    if {PROMPT, P_TUNING, PREFIX, NORMS, EMBEDDINGS} & set(could):
        names.append(f"before {own[0].name}")
    return tuple(names)


def _reaching(found: Sequence[_Shape], group: int) -> list[_Shape]:
    return [one for one in found if group in one.backward and group in one.calls]


def changed_members(seen: Training, found: Sequence[_Shape], manifest: Manifest) -> tuple[str, ...]:
    """Returns the sets of layers whose changed inputs would explain the traffic of the lowest group that was requested
    several times. Each entry holds the names of one set, joined by `+`. If the adapter changes the inputs of just
    these layers, the group causes the numbers of calls and gradients that were seen. The result is empty if no group
    was requested several times."""
    if not seen.repeated:
        return ()
    group = min(seen.repeated)
    is_lowest = group == seen.lowest and seen.below is None
    layers = [layer.name for layer in manifest.groups[group].layers]
    calls = max(one.calls.get(group, 0) for one in found)
    gradients = {one.backward[group] for one in _reaching(found, group)}
    fits = []
    for size in range(1, len(layers) + 1):
        for changed in itertools.combinations(range(len(layers)), size):
            # if a parameter below is trained, every call sends a gradient, whether its input is changed or not
            told = {size} if is_lowest else {size, calls}
            if num_calls(len(layers), changed) == calls and gradients <= told:
                fits.append("+".join(layers[place] for place in changed))
    return tuple(fits)


def num_calls(num_members: int, changed: Iterable[int]) -> int:
    """Returns how many calls a group of `num_members` layers causes, if the layers at the positions `changed` read
    changed inputs. A layer shares the previous layer's call if both read the unchanged input."""
    reads = [place if place in set(changed) else None for place in range(num_members)]
    return 1 + sum(here is not None or here != before for before, here in itertools.pairwise(reads))


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    if opened is not None:
        return []  # unmasked rows have the shape that was seen before
    found = _shapes(view, model.head_group)
    prompts, steps = _prompt_lengths(found), [one.num_rows for one in found if one.backward]
    claims: list[Claim] = []
    if prompts:
        # the last token of an answer is never given to a layer
        claims.append(StolenFact("prompt tokens", _listed(given + answered - 1 for given, answered in prompts)))
        claims.append(StolenFact("answer tokens", _listed(answered for _, answered in prompts)))
    seen = _summarise(view, found)
    could = kinds(seen, view.manifest, model)
    if len(could) < len(KINDS):
        claims.append(StolenFact(KIND, could))
        if _if_finetune(could, seen) != could:
            claims.append(StolenFact(KIND_IF_FINETUNE, _if_finetune(could, seen)))
    claims.append(StolenFact(LOWEST, _lowest_adapted(seen, could, found, view.manifest)))
    claims.append(StolenFact(MEMBERS, changed_members(seen, found, view.manifest)))
    if steps:
        claims.append(StolenFact("training rows per step", _listed(steps)))
    return [claim for claim in claims if not isinstance(claim, StolenFact) or claim.value != ()]


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


TRAFFIC_SHAPE = Adversary(
    "traffic-shape",
    "sizes, order and directions alone: lengths, training rows, PEFT kind, lowest adapted layer",
    _attack,
)
