"""This module keeps what enters the lowest adapted transformer block, so that the blocks below it are computed for each
row of the data once in a run (`cache_frozen_prefix`).

Nothing below the lowest adapter is trained, so a row's hidden states there are the same in every epoch. The first time
that a batch has a row, its hidden states are kept on disk. A batch of which all rows are kept does not compute the
blocks below, so nothing of them is sent. A batch of which one row is missing is computed as a whole. That happens in
the first epoch, and, after a checkpoint in the middle of an epoch, in the rest of that epoch and the next one.

Guarantees:
- a row is known by its position in the data, never by what it says. So which calls are left out depends on the number
  of the step, the number of rows and the seed: rows with the same contents are computed, and sent, like any others;
- a file is made for one attempt of a run and for the rows of that run, and nothing opens it again. So it cannot hold
  rows of other data: a run that goes on from a checkpoint begins with an empty file, and rows of an evaluation have
  positions after those of the training;
- a row's hidden states are kept without padding and come back bit for bit. They are encrypted, in a file without a name
  (`ReplyStore`), whose space is taken before the run sends anything of the data;
- before that, passes over made-up tokens and products show that the model can be cut here: they send nothing, and what
  leaves the model is the same to the last bit with the lower blocks and without. A model for which this does not hold,
  something trained below, and random numbers drawn below (dropout) are refused.

Not guaranteed: that hidden states are the same to the last bit as those that the batch would have computed. In float
arithmetic attention may add up in another order when a row has other company, and under a mask with an error, such as
`lattice`, a row keeps the error of the first epoch.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from noise.disk.private_files import is_in_memory
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import ProductSource, run_states
from tenant_sdk.training.activation_checkpointing import KeptReply, ReplyStore, free_disk
from tenant_sdk.training.adapted_modules import NO_PREFIX, NO_PROMPT_LEARNING
from tenant_sdk.training.loss import has_another_loss
from wire.errors import ConfigurationError, StorageError, VeilbaseError

_OPTION = "cache_frozen_prefix"

Hidden = torch.Tensor
"""The type of hidden states between two blocks, shape (batch, length, hidden_size)."""


def check_config(peft_config: PeftConfig) -> None:
    """Refuses an adapter whose virtual tokens or prefixes are trained below every block.

    Raises:
        ConfigurationError: it is one.
    """
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigurationError(NO_PROMPT_LEARNING)


# ---- the cut through a model -----------------------------------------------------------------------------------------


class FrozenPrefix:
    """Holds the blocks of one model below the lowest adapted one, and can leave them out of a pass.

    Attributes:
        first: the number of the lowest adapted block, from 0, and so of the blocks below it; the number of all blocks
            if the adapter is above them.
        num_blocks: the number of the model's blocks.
        token_bytes: the bytes of the hidden states of one token there.
    """

    def __init__(self, blocks: Sequence[nn.Module], first: int) -> None:
        """Replaces the forward methods of the blocks below `first`; passes stay as they are until a context says
        otherwise."""
        self.first, self.num_blocks, self.token_bytes = first, len(blocks), 0
        self._given: Callable[[Hidden], Hidden] | None = None
        self._see: Callable[[Hidden], None] | None = None
        self._lengths: list[int | None] = [None] * first
        """How many entries the tuple has that a block returns; None for a tensor."""
        for number, block in enumerate(blocks[:first]):
            block.forward = self._around(number, block.forward)  # type: ignore[method-assign]

    def _around(self, number: int, stock: Callable[..., Any]) -> Callable[..., Any]:
        is_last = number == self.first - 1

        @functools.wraps(stock)
        def forward(*args: Any, **options: Any) -> Any:
            if self._given is None:
                output = stock(*args, **options)
                self._lengths[number] = None if isinstance(output, torch.Tensor) else len(output)
                if is_last and self._see is not None:
                    self._see(_hidden_of(output))
                return output
            hidden = args[0] if args else options["hidden_states"]
            if is_last:
                hidden = self._given(hidden)
            length = self._lengths[number]
            return hidden if length is None else (hidden, *[None] * (length - 1))

        return forward

    @contextlib.contextmanager
    def given(self, hidden: Callable[[Hidden], Hidden]) -> Iterator[None]:
        """Returns a context in which the blocks below are not computed.

        Args:
            hidden: a function from what enters block 0 to what enters block `first`.
        """
        self._given = hidden
        try:
            yield
        finally:
            self._given = None

    @contextlib.contextmanager
    def seen(self, see: Callable[[Hidden], None]) -> Iterator[None]:
        """Returns a context in which `see` gets what enters block `first`, after the blocks below were computed."""
        self._see = see
        try:
            yield
        finally:
            self._see = None


def frozen_prefix(model: Any, *, bf16: bool) -> FrozenPrefix:
    """Prepares a model for leaving out the blocks below its lowest adapter, and shows that this is exact. It sends
    nothing.

    Args:
        model: a model of `load_model` with an adapter, before activation checkpointing is turned on.
        bf16: whether the run computes under autocast.

    Raises:
        ConfigurationError: the model has no blocks below its adapter, something below is trained or draws random
            numbers, or the model cannot be shown to be the same without its lower blocks.
    """
    base = model.get_base_model()
    if has_another_loss(base):
        raise ConfigurationError(
            f"{_OPTION} is not possible with {_name(base)}: its loss is more than the cross entropy of tokens"
        )
    blocks = _blocks(base)
    first = next((number for number, block in enumerate(blocks) if _is_adapted(block)), len(blocks))
    if first == 0:
        raise ConfigurationError(NO_PREFIX)
    prefix = FrozenPrefix(blocks, first)
    try:
        _Proof(base, prefix, bf16).run()
    except VeilbaseError:
        raise
    except Exception as exc:  # noqa: BLE001 - a model's own code may raise anything
        raise _not_shown(base, f"a pass over made-up tokens ended with {type(exc).__name__}") from None
    return prefix


def _name(base: Any) -> str:
    return str(getattr(base.config, "model_type", type(base).__name__))


def _not_shown(base: Any, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{_OPTION} is not possible with {_name(base)}: leaving out lower blocks cannot be shown to be exact ({why})"
    )


def _blocks(base: Any) -> list[nn.Module]:
    """Returns the transformer blocks of a model, lowest first."""
    num_blocks = getattr(base.config.get_text_config(), "num_hidden_layers", None)
    found = [
        list(each)
        for each in base.modules()
        if isinstance(each, nn.ModuleList) and len(each) == num_blocks and all(_is_remote(block) for block in each)
    ]
    if len(found) != 1:
        raise _not_shown(base, f"expected one list of {num_blocks} blocks, got {len(found)}")
    return found[0]


def _is_remote(block: nn.Module) -> bool:
    return any(isinstance(each, RemoteLinear | RemoteConv1D) for each in block.modules())


def _is_adapted(block: nn.Module) -> bool:
    return any(isinstance(each, BaseTunerLayer) for each in block.modules()) or any(
        each.requires_grad for each in block.parameters()
    )


def _hidden_of(output: Any) -> Hidden:
    """Returns the hidden states that a block returned, which may have nothing beside it.

    Raises:
        TypeError: the block returned something else.
    """
    first, others = (output, ()) if isinstance(output, torch.Tensor) else (output[0], output[1:])
    if not isinstance(first, torch.Tensor) or any(each is not None for each in others):
        raise TypeError("expected hidden states and nothing beside them")
    return first


class _MadeUp(ProductSource):
    """Gives made-up products, each row of which depends on its own row of the input alone, and asks nobody."""

    sends_nothing = True
    _rows = torch.empty(0, 0)

    def see(self, rows: torch.Tensor) -> None:
        """Takes the rows on which the next product depends."""
        self._rows = rows.detach().float()

    def given(self, shape: tuple[int, int]) -> torch.Tensor:
        """Returns small numbers."""
        rows = self._rows
        weights = torch.cos(torch.arange(rows.shape[1], dtype=torch.float32, device=rows.device))
        outputs = torch.arange(shape[1], dtype=torch.float32, device=rows.device)
        return torch.sin((rows * weights).sum(1, keepdim=True) + outputs).mul_(0.1)  # (num_rows, out_features)


class _Proof:
    """Shows by passes over made-up tokens that a model without its lower blocks is the same model."""

    def __init__(self, base: Any, prefix: FrozenPrefix, bf16: bool) -> None:
        self._base, self._prefix, self._bf16 = base, prefix, bf16
        self._device = torch.device(base.device)
        self._attn_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=self._device)  # (batch, length)
        self._entered: list[Hidden] = []
        self._drawn: list[Any] = []

    def run(self) -> None:
        """Raises ConfigurationError unless all holds, and notes the bytes of a token."""
        modes = [(module, module.training) for module in self._base.modules()]
        devices = [self._device] if self._device.type == "cuda" else []
        autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)
        source = run_states(self._base).products_from(_MadeUp())
        try:
            with torch.random.fork_rng(devices=devices), autocast, source, self._prefix.seen(self._note):
                self._base.train()
                self._check_frozen()
                self._base.eval()
                with torch.no_grad():
                    self._check_exact()
        finally:
            for module, mode in modes:
                module.training = mode

    def _note(self, hidden: Hidden) -> None:
        self._entered.append(hidden)
        self._drawn.append(self._random_state())

    def _random_state(self) -> list[Any]:
        states = [torch.get_rng_state().tolist(), random.getstate()]
        return [*states, torch.cuda.get_rng_state(self._device).tolist()] if self._device.type == "cuda" else states

    def _logits(self, number: int) -> torch.Tensor:
        """Returns the logits of the attended positions of batch number 0 or 1: (positions, vocabulary)."""
        vocab = int(self._base.get_input_embeddings().weight.shape[0])
        tokens = (torch.arange(10, device=self._device).view(2, 5) + 7 * number) % vocab
        with run_states(self._base).padding.labels_known():
            made = self._base(input_ids=tokens, attention_mask=self._attn_mask, use_cache=False)
        logits: torch.Tensor = made.logits[self._attn_mask.bool()]
        return logits

    def _check_frozen(self) -> None:
        before = self._random_state()
        self._logits(0)
        (entered,), (after,) = self._entered, self._drawn
        below = f"below block {self._prefix.first}, the lowest adapted one"
        if entered.requires_grad:
            raise ConfigurationError(f"{_OPTION} needs frozen layers {below}: something there is trained")
        if before != after:
            raise ConfigurationError(
                f"{_OPTION} needs the same hidden states in every epoch: the model has dropout {below}"
            )
        if entered.shape[:2] != self._attn_mask.shape or entered.dim() != 3:
            raise _not_shown(self._base, "its blocks pass on hidden states in another shape")
        self._prefix.token_bytes = entered.shape[2] * entered.element_size()

    def _check_exact(self) -> None:
        """Compares a pass without the lower blocks with one that had them; another pass between the two leaves nothing
        of the first one in the model."""
        self._entered.clear()
        want, other = self._logits(0), self._logits(1)
        if len(self._entered) != 2:
            raise _not_shown(self._base, "a block runs several times")
        entered = self._entered[0]
        if torch.equal(*self._entered) or torch.equal(want, other):
            raise _not_shown(self._base, "what enters a block does not depend on the tokens")
        with self._prefix.given(lambda hidden: _filled(hidden, list(entered), self._attn_mask.sum(1).tolist())):
            got = self._logits(0)
        if not torch.equal(got, want):
            raise _not_shown(self._base, "upper blocks read more than what the one below gives them")


def _filled(hidden: Hidden, rows: Sequence[torch.Tensor], lengths: Sequence[int]) -> Hidden:
    """Returns hidden states whose first positions are those of rows; padding keeps what entered block 0.

    Args:
        hidden: what enters block 0.
        rows: for each row of the batch, shape (its length or more, hidden_size).
        lengths: the lengths of the rows.
    """
    filled = hidden.detach().to(rows[0].dtype, copy=True)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        filled[number, :length] = row[:length]
    return filled


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


# ---- the rows of a run -----------------------------------------------------------------------------------------------


class PrefixCache:
    """Keeps the hidden states of the rows of one attempt of a run, by their positions in its data."""

    def __init__(self, prefix: FrozenPrefix, lengths: Sequence[int], folder: Path) -> None:
        """Makes an empty cache; `open` takes its space.

        Args:
            prefix: the cut through the run's model.
            lengths: the tokens of each row, by position: those of the training, then those of evaluations.
            folder: the folder on whose disk the file is made.
        """
        self.prefix, self._lengths, self._folder = prefix, list(lengths), folder
        self._store = ReplyStore(0, folder, f"the file of {_OPTION}", f"leave out {_OPTION}")
        self._kept: list[KeptReply | None] = [None] * len(self._lengths)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the file, which holds every token of every row once."""
        return sum(self._lengths) * self.prefix.token_bytes

    def open(self) -> str:
        """Takes the file's space, and returns one line for the user on what is kept, where, and how large it is.

        Raises:
            StorageError: the disk has no room.
        """
        free = free_disk(self._folder)
        if self.num_bytes > free:
            raise StorageError(
                f"expected {_size(self.num_bytes)} of free disk for {_OPTION} at {self._folder}, got {_size(free)}: "
                "make room, or leave the option out"
            )
        self._store.reserve(self.num_bytes)
        where = "memory (tmpfs)" if is_in_memory(self._folder) else "disk"
        return (
            f"{_OPTION}: {_size(self.num_bytes)} of {where} for what enters block {self.prefix.first} of "
            f"{self.prefix.num_blocks}, encrypted, until the run ends"
        )

    @contextlib.contextmanager
    def batch(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Returns a context for the forward pass of a batch, which computes the lower blocks, or does not if all of the
        batch's rows are kept.

        Args:
            positions: the rows' positions in the data, int64, shape (batch,); None for a pass that is not of the data.
        """
        if positions is None:
            yield
            return
        numbers = positions.tolist()
        kept = [each for number in numbers if (each := self._kept[number]) is not None]
        lengths = [self._lengths[number] for number in numbers]
        if len(kept) == len(numbers):
            with self.prefix.given(lambda hidden: _filled(hidden, [each.take() for each in kept], lengths)):
                yield
            return
        with self.prefix.seen(lambda hidden: self._keep(numbers, hidden)):
            yield

    def _keep(self, numbers: Sequence[int], hidden: Hidden) -> None:
        for number, row in zip(numbers, hidden.detach(), strict=True):
            if self._kept[number] is None:
                self._kept[number] = self._store.keep(row[: self._lengths[number]])

    def close(self) -> None:
        """Removes the file and drops its key."""
        self._kept = [None] * len(self._lengths)
        self._store.close()
