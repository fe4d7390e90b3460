"""This module trains in windows: a batch's tokens are split into ranges that go through the model one by one.

The forward pass goes from the first window to the last and keeps the keys and values. The backward pass goes from the
last window to the first. The tenant thus keeps the autograd graph of one window, not of the whole batch. A provider
gets requests with the rows of one window, which its scheduler need not split to keep a latency target. In return, all
windows but the last go through the model's forward pass twice.

Guarantees: gradients equal those of the whole batch, up to the rounding of floating-point sums, unless the model uses
dropout, whose random numbers are drawn for each window, and are the same in both passes of a window. The calls and
their numbers of rows follow from the batch's shape, the window and the adapter. No window is left out, even if it has
no label or comes after the last label. The head is called for the rows for which it would be called without windows.

Source: FlexLLM (arXiv:2402.18789), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import Trainer
from transformers.utils import ModelOutput

from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX
from tenant_sdk.training.soft_prompts import Prompted, kind_of
from tenant_sdk.training.window_attention import allow_recomputation, check_adapter, share_masks, sliding_windows
from tenant_sdk.training.window_cache import WindowCache
from wire.errors import ConfigurationError

_LOGITS_AT_ONCE = 1 << 22
"""The number of logits that are computed together if the tenant holds the head: 16 MiB in float32, and three times as
much with their gradient and softmax."""

_Inputs = Mapping[str, torch.Tensor]
_Window = tuple[int, int]
"""The token range of a window: (index of the first token, index after the last token)."""
_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


class Windows:
    """Computes a batch's loss and gradients window by window, with a model that has an adapter.

    Attributes:
        contexts: a function that is called for each window that goes through the model twice, and returns the contexts
            of its first and of its second pass, as `context_fn` does for torch's activation checkpointing.
    """

    contexts: Callable[[], _Contexts] = staticmethod(lambda: (nullcontext(), nullcontext()))

    def __init__(self, model: Any, window_tokens: int) -> None:
        """Prepares a model for windows; nothing is sent.

        Args:
            model: a PEFT model over a causal language model of transformers.
            window_tokens: the most tokens of a window, over all rows of the batch.

        Raises:
            ConfigurationError: the model or the adapter cannot be trained in windows; the text says why.
        """
        self._model, self._window_tokens = model, window_tokens
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        check_adapter(model)
        # PEFT's forward method would add a soft prompt to every window
        self._run = self._causal if kind_of(model) else model
        self._sliding_windows = sliding_windows(self._causal)
        share_masks(self._causal)
        allow_recomputation(self._causal)
        self._body: Any = None
        self._body_output: type[ModelOutput] = ModelOutput
        self._hidden: torch.Tensor | None = None
        for body in {self._causal.base_model, self._causal.get_decoder()} - {self._causal}:
            body.register_forward_hook(self._keep_hidden)
        head = self._causal.get_output_embeddings()
        self._head_is_remote = any(isinstance(part, RemoteLinear | RemoteConv1D) for part in head.modules())

    def _keep_hidden(self, body: Any, args: Any, output: Any) -> None:
        if isinstance(output, ModelOutput):  # of nested modules, the outermost ends last
            self._body, self._body_output, self._hidden = body, type(output), output[0]

    def backward(
        self, inputs: _Inputs, count: Any = None, every_position: bool = False, share: float = 1.0
    ) -> torch.Tensor:
        """Computes the mean cross-entropy over labelled tokens, and adds its gradients to those of the parameters.

        Args:
            inputs: a batch of a `Collator`: `input_ids`, `attention_mask` and `labels`, shape (batch, num_tokens).
            count: the number by which the sum of the losses is divided; None for the number of labels.
            every_position: whether the head is called for every position, and not only for those at which some row has
                a label.
            share: a factor of the loss. It is below 1 if the gradients of several batches are added.

        Returns:
            The loss times `share`, without an autograd graph.

        Raises:
            ConfigurationError: a layer of the model does not use its cache, or the model does not show its last hidden
                states.
        """
        prompted = Prompted(self._model, inputs)
        inputs = prompted.inputs
        targets = functional.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]  # position p predicts token p + 1
        num_labels = (targets != IGNORE_INDEX).sum() if count is None else count
        scale = share / max(int(num_labels), 1)  # a batch may have no label: see tenant_sdk/text/rows.py
        batch, num_tokens = targets.shape
        length = max(self._window_tokens // batch, 1)
        windows = [(start, min(start + length, num_tokens)) for start in range(0, num_tokens, length)]
        seeds = [int(seed) for seed in torch.randint(1 << 62, (len(windows),))]
        cache = WindowCache(self._sliding_windows, num_tokens, prompted.prefix)
        again: list[AbstractContextManager[object]] = []
        hidden, last = self._forward(inputs, windows, seeds, cache, again)
        rows = hidden.flatten(0, 1)
        index = self._rows_for_head(targets, every_position)
        total, gradient = self._head(rows[index], targets.flatten()[index], scale, last.requires_grad)
        if gradient is None:
            return total
        rows.zero_()[index] = gradient  # from here on, `hidden` is the gradient of the hidden states
        self._backward(inputs, windows, seeds, cache, again, last, hidden)
        prompted.backward()
        return total + self._regularise(share)

    def _regularise(self, share: float) -> torch.Tensor:
        """Returns what the adapter itself adds to a batch's loss, times `share`, and adds its gradients to those of the
        parameters. AdaLoRA does so; other kinds add nothing.

        PEFT's forward method runs for it, over a base model that does nothing but return a loss of zero.
        """
        nothing = SimpleNamespace(loss=torch.zeros((), device=self._causal.device))
        with _replaced_forward(self._causal, nothing):
            loss: torch.Tensor = self._run(input_ids=None).loss * share
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _backward(
        self, inputs: _Inputs, windows: list[_Window], seeds: list[int], cache: WindowCache,
        again: list[AbstractContextManager[object]], last: torch.Tensor, gradient: torch.Tensor,
    ) -> None:  # fmt: skip
        """Runs the backward pass, from the last window to the first, which adds to the gradients of the parameters.

        Args:
            inputs, windows, seeds, cache, again: the arguments that `_forward` got.
            last: the hidden states after the model's last layer, for the last window, with their autograd graph.
            gradient: the gradient of the hidden states after the model's last layer, for all tokens, shape (batch,
                num_tokens, hidden size).
        """
        for number in reversed(range(len(windows))):
            start, stop = windows[number]
            if number < len(windows) - 1:
                with again.pop():
                    last = self._pass(inputs, windows[number], seeds[number], cache)
            # always a root, so that a window without a label makes the calls of others
            roots, gradients = [last], [gradient[:, start:stop]]
            for own, own_gradient in cache.taken(stop):
                roots.append(own)
                gradients.append(own_gradient)
            torch.autograd.backward(roots, gradients)
        virtual = list(cache.prefix_gradients())
        torch.autograd.backward([own for own, _ in virtual], [gradient for _, gradient in virtual])

    def _forward(
        self, inputs: _Inputs, windows: list[_Window], seeds: list[int], cache: WindowCache,
        again: list[AbstractContextManager[object]],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Returns the hidden states after the model's last layer, and again those of the last window with their graph.

        Args:
            inputs: see `backward`.
            windows: all windows.
            seeds: a seed for each window's random numbers.
            cache: an empty cache.
            again: an empty list, to which the contexts of second passes are added.
        """
        parts = []
        with torch.no_grad():
            for window, seed in zip(windows[:-1], seeds, strict=False):
                first, second = self.contexts()
                again.append(second)
                with first:
                    parts.append(self._pass(inputs, window, seed, cache))
        last = self._pass(inputs, windows[-1], seeds[-1], cache)
        return torch.cat([*parts, last.detach()], dim=1), last

    def _pass(self, inputs: _Inputs, window: _Window, seed: int, cache: WindowCache) -> torch.Tensor:
        """Runs one window through the model, and returns the hidden states after the last layer, shape (batch, window
        tokens, hidden size)."""
        start, stop = window
        cache.begin(start)
        device = inputs["labels"].device
        tokens = {name: inputs[name][:, start:stop] for name in ("input_ids", "inputs_embeds") if name in inputs}
        with _random_numbers(seed, device):
            self._run(
                **tokens, attention_mask=inputs["attention_mask"][:, : cache.num_virtual + stop], past_key_values=cache,
                use_cache=True, logits_to_keep=torch.empty(0, dtype=torch.long, device=device),
            )  # fmt: skip
        cache.check()
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ConfigurationError("window_tokens is not possible: this model does not show its last hidden states")
        return hidden

    def _rows_for_head(self, targets: torch.Tensor, every_position: bool) -> torch.Tensor:
        """Returns the indices of the rows for which the head is called, out of all batch · num_tokens rows.

        The provider sees how many rows a remote head gets. These are all rows of each position at which some row has a
        label, as without windows, or all rows.
        """
        labelled = targets != IGNORE_INDEX
        if every_position:
            labelled = torch.ones_like(labelled)
        elif self._head_is_remote:
            labelled = labelled.any(dim=0).expand_as(labelled)
        return labelled.flatten().nonzero().squeeze(1)

    def _head(
        self, rows: torch.Tensor, targets: torch.Tensor, scale: float, needs_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the loss from hidden states, some rows at a time, and the gradients of the head's parameters.

        Args:
            rows: hidden states after the model's last layer, shape (num_rows, hidden size).
            targets: the next tokens, or IGNORE_INDEX, shape (num_rows,).
            scale: the factor by which the sum of the losses is multiplied.
            needs_gradient: whether the gradient of `rows` is needed.

        Returns:
            (the loss, the gradient of `rows` or None).
        """
        gradient = torch.zeros_like(rows) if needs_gradient else None
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        size = self._rows_at_once()
        for begin in range(0, rows.shape[0], size):
            part = rows[begin : begin + size].detach().requires_grad_(needs_gradient)
            wanted = targets[begin : begin + size]
            loss = scale * functional.cross_entropy(
                self._logits(part), wanted, ignore_index=IGNORE_INDEX, reduction="sum"
            )
            total += loss.detach()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            if gradient is not None and part.grad is not None:
                gradient[begin : begin + size] = part.grad
        return total, gradient

    def _rows_at_once(self) -> int:
        """Returns for how many rows logits are computed together; a remote head gets whole windows."""
        vocabulary = int(self._causal.config.get_text_config(decoder=True).vocab_size)
        return self._window_tokens if self._head_is_remote else max(_LOGITS_AT_ONCE // vocabulary, 1)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of some hidden states. The model's own code computes them: it runs, but with the given
        hidden states in place of those that its transformer blocks would compute.

        Args:
            rows: hidden states after the last layer, shape (num_rows, hidden size).

        Returns:
            float32, shape (num_rows, vocabulary).
        """
        with _replaced_forward(self._body, self._body_output(last_hidden_state=rows[None])):
            ids = torch.zeros(1, rows.shape[0], dtype=torch.long, device=rows.device)
            logits: torch.Tensor = self._causal(input_ids=ids, use_cache=False).logits
        self._hidden = None
        return logits[0].float()


@contextmanager
def _replaced_forward(module: Any, output: Any) -> Iterator[None]:
    """Makes a module return `output` inside the context, in place of what its own forward method computes."""
    before = module.__dict__.get("forward")
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators with `seed` inside the context, for dropout, and restores them afterwards."""
    kind, devices = ("cuda", []) if device.type == "cpu" else (device.type, [device])
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


def training_step(
    trainer: Trainer, windows: Windows, inputs: Any, num_items_in_batch: Any, every_position: bool
) -> torch.Tensor:
    """Replaces transformers' `Trainer.training_step`: computes a batch's loss and adds to the parameters' gradients.

    Args:
        trainer: the trainer that takes the step.
        windows: computes the loss of the trainer's model window by window.
        inputs: a batch of a `Collator`.
        num_items_in_batch: the number of labels in all batches of the optimizer step; None if it is not known.
        every_position: see `Windows.backward`.

    Returns:
        The loss, as `Trainer.training_step` does: divided by the number of batches, if the number of labels is unknown.
    """
    trainer.model.train()
    share = 1.0 if num_items_in_batch is not None else 1 / trainer.current_gradient_accumulation_steps
    with trainer.compute_loss_context_manager():
        return windows.backward(trainer._prepare_inputs(inputs), num_items_in_batch, every_position, share)
