"""This module leaves padding out of what a model sends. In a batch of texts of unequal length, the shorter ones are
padded; the attention mask says where. Rows of such positions go to nobody: in their place a layer's output is zero, and
so is the gradient of its input.

Why the result stays the same: no position attends to one that is masked, so what a masked position holds reaches the
loss only by a label there, or by a label that is predicted there. A pass with such labels sends all of its rows.
Masked keys and values have a weight of exactly zero, zeros like anything else, and the gradient of a masked position
is zero anyway. In float arithmetic the provider's own sums may differ in their last bits, as they do with any other
number of rows.

What a provider sees of it is the number of tokens of a batch in place of the number of its rows times the longest.
With `pad_rows` padding is there to hide lengths, and is sent.

Not left out: padding in a pass whose attention mask is missing or not of one number for each position; in models that
carry a state from token to token; and in the second run of a block under activation
checkpointing that `finetune` has not turned on, which sends zeros in its place for the backward pass.
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
from torch import nn


@dataclass(frozen=True, eq=False)
class Attended:
    """Says which positions of a batch are attended to.

    Attributes:
        shape: (batch, length), in tokens.
        rows: int64, the numbers of the attended positions, counted row after row.
        for_head: the same of the positions for which the head is called, if the model was asked for some only
            (`logits_to_keep`).
    """

    shape: tuple[int, int]
    rows: torch.Tensor
    for_head: Attended | None = None

    @classmethod
    def where(cls, is_attended: torch.Tensor, for_head: Attended | None = None) -> Attended:
        """Takes the positions from a mask, bool, shape (batch, length)."""
        batch, length = is_attended.shape
        return cls((batch, length), is_attended.flatten().nonzero().squeeze(1), for_head)

    def of(self, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
        """Returns the numbers of the rows to send of a layer's input, or None to send them all.

        Args:
            shape: the input's shape, (..., features).
            device: where the numbers are wanted.
        """
        batch, length = self.shape
        if shape[:-1] != self.shape and shape[:-1] != (batch * length,):
            return None if self.for_head is None else self.for_head.of(shape, device)
        return self.rows if self.rows.device == device else self.rows.to(device)


class Padding:
    """Knows which positions the pass that a thread is in attends to, for one model."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def attended(self) -> Attended | None:
        """Returns the attended positions of this thread's pass; None outside a pass, and if it has no padding."""
        passes: list[Attended | None] = getattr(self._local, "passes", [])
        return passes[-1] if passes else None

    def within(self, attended: Attended | None) -> AbstractContextManager[None]:
        """Returns a context in which this thread is in a pass with these positions, such as the second run of a block.
        It can be entered again and again."""
        return _Pass(self, attended)

    def leave_out(self, model: nn.Module) -> None:
        """Makes a causal model of transformers send no padding from now on. Does nothing for a model that carries a
        state from token to token, in which padding may count."""
        if getattr(model, "_is_stateful", False):
            return
        decoder = getattr(model, "get_decoder", lambda: None)()
        for part in {id(each): each for each in (model.base_model, decoder) if isinstance(each, nn.Module)}.values():
            part.register_forward_pre_hook(self._before, with_kwargs=True)
            part.register_forward_hook(self._after, always_call=True)
        stock = type(model).forward
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def forward(model: nn.Module, *args: Any, **options: Any) -> Any:
            given = signature.bind_partial(model, *args, **options).arguments if args else options
            if _labels_padding(given):
                with self._sending_all():
                    return stock(model, *args, **options)
            with self.within(_attended(given)):  # the head, which the provider may hold, is not in the decoder
                return stock(model, *args, **options)

        # A method, so that a copy of the model gets one of its own. PEFT calls it without the module's hooks.
        model.forward = types.MethodType(forward, model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Padding:
        """Returns this same object, since the layers of a copied model ask it too."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a model whose layers are at a provider is never pickled."""
        raise TypeError("a model over a provider cannot be pickled: save the adapter instead")

    @contextlib.contextmanager
    def _sending_all(self) -> Iterator[None]:
        before = getattr(self._local, "sends_all", False)
        self._local.sends_all = True
        try:
            yield
        finally:
            self._local.sends_all = before

    def _before(self, decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        given = options if not args else {"input_ids": args[0], **options}
        self.begin(None if getattr(self._local, "sends_all", False) else _attended(given))

    def _after(self, decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.end()

    def begin(self, attended: Attended | None) -> None:
        """Begins a pass of this thread with these positions, inside the one that it may be in."""
        if not hasattr(self._local, "passes"):
            self._local.passes = []
        self._local.passes.append(attended)

    def end(self) -> None:
        """Ends the pass that began last, if one did."""
        if passes := getattr(self._local, "passes", []):
            passes.pop()


class _Pass(AbstractContextManager[None]):
    def __init__(self, padding: Padding, attended: Attended | None) -> None:
        self._padding, self._attended = padding, attended

    def __enter__(self) -> None:
        self._padding.begin(self._attended)

    def __exit__(self, *exc_info: object) -> None:
        self._padding.end()


def _attended(given: Mapping[str, Any]) -> Attended | None:
    """Returns the attended positions of a pass from the arguments of a model or of its decoder; None if all are, or if
    the mask does not say."""
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
        for_head = Attended.where(is_attended[:, kept.to(mask.device)])
    elif type(kept) is int and 0 < kept < length:
        for_head = Attended.where(is_attended[:, -kept:])
    return Attended.where(is_attended, for_head)


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
