"""This module leaves padding out of what a model sends. In a batch of texts of unequal length, the shorter ones are
padded; the attention mask says where. Rows of such positions go to nobody: in their place a layer's output is zero, and
so is the gradient of its input.

Why the result stays the same: no position attends to one that is masked, so what a masked position holds reaches the
loss only by a label there, or by a label that is predicted there. Masked keys and values have a weight of exactly zero,
zeros like anything else, and the gradient of a masked position is zero anyway. In float arithmetic the provider's own
sums may differ in their last bits, as they do with any other number of rows.

So padding is left out only where the labels are known: in a pass that is given `labels`, none of which is on padding or
predicted there; in the passes of `finetune`, whose losses use no others; and in a pass over a cache that records no
gradient, as `generate` makes them, which reads the last position of each text. All other passes send all rows, such as
one whose loss is computed outside the model.

What a provider sees of it is the number of tokens of a batch in place of the number of its rows times the longest.
With `pad_rows` padding is there to hide lengths, and is sent.

Not left out either: padding in a pass whose attention mask is missing or not of one number for each position; in models
with layers that carry a state from token to token; in layers that get a batch's tokens in another shape; and in the
second run of a block under activation checkpointing that `finetune` has not turned on, which sends zeros in its place
for the backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Attended:
    """Says which positions of a batch are attended to.

    Attributes:
        shape: (batch, length), in tokens.
        rows: int64, the numbers of the attended positions, counted row after row.
        for_head: the same of the positions for which the head is called, if the model was asked for some only
            (`logits_to_keep`).
        may_be_flat: whether an input of batch · length rows has the positions in their order. An expert's rows may be
            in another one.
    """

    shape: tuple[int, int]
    rows: torch.Tensor
    for_head: Attended | None = None
    may_be_flat: bool = False

    @classmethod
    def where(cls, is_attended: torch.Tensor, for_head: Attended | None = None, may_be_flat: bool = False) -> Attended:
        """Takes the positions from a mask, bool, shape (batch, length)."""
        batch, length = is_attended.shape
        return cls((batch, length), is_attended.flatten().nonzero().squeeze(1), for_head, may_be_flat)

    def of(self, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
        """Returns the numbers of the rows to send of a layer's input, or None to send them all.

        Args:
            shape: the input's shape, (..., features).
            device: where the numbers are wanted.
        """
        is_flat = self.may_be_flat and shape[:-1] == (self.shape[0] * self.shape[1],)
        if shape[:-1] != self.shape and not is_flat:
            return None if self.for_head is None else self.for_head.of(shape, device)
        return self.rows if self.rows.device == device else self.rows.to(device)


class Padding:
    """Knows which positions the pass that a thread is in attends to, for one model."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def attended(self) -> Attended | None:
        """Returns the attended positions of this thread's pass; None outside a pass, and if it has no padding."""
        return self.passes[-1] if self.passes else None

    def within(self, attended: Attended | None) -> AbstractContextManager[None]:
        """Returns a context in which this thread is in a pass with these positions, such as the second run of a block.
        It can be entered again and again."""
        return _Pass(self, attended)

    def leave_out(self, model: PreTrainedModel) -> None:
        """Makes a causal model of transformers send no padding from now on, where the labels are known. Does nothing
        for a model that carries a state from token to token, in which padding may count."""
        if getattr(model, "_is_stateful", False) or not _only_attends(model.config):
            return
        stock = type(model).forward
        settings = vars(model.config.get_text_config())
        has_experts = any("expert" in name for name in settings if not name.startswith("_"))
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def forward(model: PreTrainedModel, *args: Any, **options: Any) -> Any:
            given = signature.bind_partial(model, *args, **options).arguments if args else options
            may_leave_out = getattr(self._local, "labels_known", False) or _labels_known(given)
            with self.within(_attended(given, not has_experts) if may_leave_out else None):
                return stock(model, *args, **options)

        # A method, so that a copy of the model gets one of its own. PEFT calls it without the module's hooks.
        model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def labels_known(self) -> Iterator[None]:
        """Returns a context for passes whose caller uses no logits of padding."""
        before = getattr(self._local, "labels_known", False)
        self._local.labels_known = True
        try:
            yield
        finally:
            self._local.labels_known = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Padding:
        """Returns this same object, since the layers of a copied model ask it too."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a model whose layers are at a provider is never pickled."""
        raise TypeError("a model over a provider cannot be pickled: save the adapter instead")

    @property
    def passes(self) -> list[Attended | None]:
        """Returns the positions of the passes that this thread is in, the innermost last."""
        if not hasattr(self._local, "passes"):
            self._local.passes = []
        return self._local.passes  # type: ignore[no-any-return]


class _Pass(AbstractContextManager[None]):
    def __init__(self, padding: Padding, attended: Attended | None) -> None:
        self._padding, self._attended = padding, attended
        self._depths: list[int] = []

    def __enter__(self) -> None:
        self._depths.append(len(self._padding.passes))
        self._padding.passes.append(self._attended)

    def __exit__(self, *exc_info: object) -> None:
        del self._padding.passes[self._depths.pop() :]


_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers, in transformers' configs, through which a token learns of others by attention alone."""


def _only_attends(config: Any) -> bool:
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) <= _ATTENTION


def _labels_known(given: Mapping[str, Any]) -> bool:
    """Tells, from the arguments of a causal model, whether no logits of padding can count."""
    if given.get("shift_labels") is not None:
        return False
    if given.get("labels") is None:
        return given.get("past_key_values") is not None and not torch.is_grad_enabled()
    return not _labels_padding(given)


def _attended(given: Mapping[str, Any], may_be_flat: bool) -> Attended | None:
    """Returns the attended positions of a pass from the arguments of a model; None if all are, or if the mask does not
    say."""
    tokens, mask = given.get("input_ids"), given.get("attention_mask")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if not isinstance(tokens, torch.Tensor) or not isinstance(mask, torch.Tensor) or tokens.dim() < 2:
        return None
    batch, length = tokens.shape[:2]
    cached: Any = given.get("past_key_values")
    seen = int(cached.get_seq_length()) if hasattr(cached, "get_seq_length") else 0
    if mask.shape != (batch, seen + length):
        return None
    is_attended = mask[:, seen:] != 0
    if bool(is_attended.all()):
        return None
    kept = given.get("logits_to_keep")
    for_head = None
    if isinstance(kept, torch.Tensor) and kept.dim() == 1:
        if kept.numel() >= length:
            return None  # a head's rows could not be told from a layer's
        for_head = Attended.where(is_attended[:, kept.to(mask.device)])
    elif type(kept) is int and 0 < kept < length:
        for_head = Attended.where(is_attended[:, -kept:])
    return Attended.where(is_attended, for_head, may_be_flat)


def _labels_padding(given: Mapping[str, Any]) -> bool:
    """Tells, from the arguments of a causal model, whether a position that is not attended to has a label, or predicts
    one."""
    labels, mask = given.get("labels"), given.get("attention_mask")
    if not isinstance(labels, torch.Tensor) or not isinstance(mask, torch.Tensor):
        return False
    if labels.dim() != 2 or mask.dim() != 2 or mask.shape[1] < labels.shape[1]:
        return False
    is_padding = mask[:, mask.shape[1] - labels.shape[1] :] == 0
    has_label = (labels != _IGNORED).to(mask.device)
    return bool((is_padding & has_label).any()) or bool((is_padding[:, :-1] & has_label[:, 1:]).any())


_IGNORED = -100
"""The label of a position that is not trained on, in transformers."""
