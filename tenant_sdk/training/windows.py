"""This module trains in windows: a batch's tokens are split into ranges, the windows, that go through the model one by
one.

The forward pass goes from the first window to the last and keeps the keys and values. The backward pass goes from the
last window to the first. The tenant thus keeps the autograd graph of one window, not of the whole batch. A provider
gets requests with the rows of one window, which its scheduler need not split to keep a latency target. In return, all
windows but the last go through the model's forward pass twice.

A later window attends to the keys and values of earlier windows, so its backward pass gives a part of their gradients.
These parts are added up. The backward pass of the window that computed the keys and values starts from the sum.

An adapter may have a soft prompt: virtual tokens in front of every row, which are trained. Prompt tuning and P-tuning
train their embeddings, and prefix tuning trains their keys and values in every layer.

Guarantees:
- gradients equal those of the whole batch, up to the rounding of floating-point sums, unless the model uses dropout,
  whose random numbers are drawn for each window, and are the same in both passes of a window;
- the calls and their numbers of rows follow from the batch's shape, the window and the adapter. No window is left out,
  even if it has no label or comes after the last label. The head is called for the rows for which it would be called
  without windows;
- a model or adapter that cannot be trained in windows is refused with one line that says why. Their configurations
  decide this. At run time `WindowCache.check` finds layers that do not use their cache;
- the keys of a layer are one tensor for all tokens, and so are its values. A window gets a view of a part of it, not a
  copy. The memory of a layer's gradients is allocated when the first gradient arrives. By then autograd has freed what
  it kept for this layer;
- a batch gets the virtual tokens that PEFT's own forward method would give it. The gradients of the virtual tokens are
  collected while the windows go backward, and reach the adapter once, after the last window.

Source: FlexLLM (arXiv:2402.18789), Algorithm 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, Trainer
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import run_states
from tenant_sdk.training.activation_checkpointing import give_pages_back
from tenant_sdk.training.loss import has_another_loss, is_padding
from tenant_sdk.training.token_rows import IGNORE_INDEX
from wire.errors import ConfigurationError

EMBEDDINGS = frozenset({"PROMPT_TUNING", "P_TUNING"})
"""PEFT's names of the kinds that train embeddings of virtual tokens."""
PREFIX = "PREFIX_TUNING"
"""PEFT's name of the kind that trains keys and values of virtual tokens."""

_Inputs = Mapping[str, torch.Tensor]


def kind_of(model: Any) -> str | None:
    """Returns PEFT's name of a model's kind of soft prompt; None if the model has no soft prompt."""
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))


class Prompted:
    """Holds a batch with the soft prompt of a model, if the model has one.

    Attributes:
        inputs: the batch: `attention_mask`, `labels`, and either `input_ids` or `inputs_embeds`. Embeddings of virtual
            tokens are in front of the rows; keys and values are not, but have places in `attention_mask`.
        prefix: the keys and values of the virtual tokens in each layer; None for other kinds.
    """

    def __init__(self, model: Any, inputs: _Inputs) -> None:
        """Adds the soft prompt of a PEFT model to a batch, with the graph through which its gradients go."""
        kind, num_rows = kind_of(model), inputs["labels"].shape[0]
        self.inputs: _Inputs = inputs
        self.prefix: Cache | None = None
        self._embeddings: torch.Tensor | None = None
        if kind is None:
            return
        with torch.enable_grad():
            prompt = model.get_prompt(num_rows)
        num_virtual = model.active_peft_config.num_virtual_tokens
        changed = {"attention_mask": functional.pad(inputs["attention_mask"], (num_virtual, 0), value=1)}
        if kind == PREFIX:
            self.prefix = prompt
        else:
            with torch.enable_grad():
                embedded = model.word_embeddings(inputs["input_ids"])
                self._embeddings = torch.cat([prompt.to(embedded.dtype), embedded], dim=1)
            # rows ask for gradients as those of PEFT's forward method do, so the calls are the same
            changed["inputs_embeds"] = self._embeddings.detach().requires_grad_()
            changed["labels"] = functional.pad(inputs["labels"], (num_virtual, 0), value=IGNORE_INDEX)
        self.inputs = {**{name: value for name, value in inputs.items() if name != "input_ids"}, **changed}
        if kind == PREFIX:
            self.inputs["input_ids"] = inputs["input_ids"]

    def backward(self) -> None:
        """Adds the gradients of the embeddings of virtual tokens to those of the adapter's parameters."""
        if self._embeddings is not None and self._embeddings.requires_grad:
            torch.autograd.backward([self._embeddings], [self.inputs["inputs_embeds"].grad])


_ATTENTION = "veilbase_windows"
"""The name under which transformers' tables hold the attention function of this module."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""The rotary embeddings of transformers 5.23 (`dynamic_rope_update`) that change with the longest position of a
batch."""
_NOT_BY_TOKEN = frozenset({"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "XLORA"})
"""The kinds of adapters, apart from soft prompts, that do not treat each token by itself. Lily takes a mean over
tokens, and Shadow has a network of its own over all tokens."""
_SOFT_PROMPTS = EMBEDDINGS | {PREFIX}
"""The kinds of soft prompts that windows support. Others need more than token ids (multitask prompt tuning) or have a
loss of their own (CPT)."""


def check_window(window_tokens: int | None, batch_size: int, room: int) -> None:
    """Checks the size of a window against the sizes of the batch and of the context, before anything is sent.

    Args:
        window_tokens: the most tokens of a window, over all rows of the batch; None if training uses no windows.
        batch_size: the number of rows of a batch.
        room: the most tokens of a row.

    Raises:
        ConfigurationError: the window has less than one token for each row, or more tokens than the longest batch.
    """
    if window_tokens is not None and not batch_size <= window_tokens <= batch_size * room:
        raise ConfigurationError(
            f"window_tokens (--window-tokens) counts the tokens of a window over all {batch_size} rows of a batch: "
            f"expected {batch_size} to {batch_size * room}, got {window_tokens}"
        )


def check_adapter(model: Any) -> None:
    """Raises ConfigurationError if an adapter neither treats each token by itself nor is a soft prompt of a known
    kind."""
    config = getattr(model, "active_peft_config", None)
    if config is None:
        return
    kind = getattr(config.peft_type, "value", str(config.peft_type))
    if kind in _NOT_BY_TOKEN or kind_of(model) not in {None, *_SOFT_PROMPTS}:
        raise ConfigurationError(f"window_tokens is not possible with {kind}: take an adapter of layers, such as LoRA")
    if getattr(config, "alora_invocation_tokens", None):
        raise ConfigurationError("window_tokens is not possible with alora_invocation_tokens")


def sliding_windows(model: Any) -> list[int | None]:
    """Returns for each layer the number of tokens that a token attends to; None stands for all earlier tokens.

    Raises:
        ConfigurationError: the model's attention cannot be cut into windows.
    """
    config = model.config.get_text_config(decoder=True)

    def refused(reason: str) -> ConfigurationError:
        return ConfigurationError(f"window_tokens is not possible with {config.model_type}: {reason}")

    taken = inspect.signature(model.forward).parameters
    if getattr(model, "_is_stateful", False) or not {"past_key_values", "logits_to_keep"} <= taken.keys():
        raise refused("its layers keep other than keys and values")
    layers = DynamicCache(config=config).layers
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise refused("its layers keep other than keys and values")
    if has_another_loss(model):
        raise refused("its loss is more than the cross entropy of tokens")
    if getattr(config, "num_kv_shared_layers", None):
        raise refused("its layers share keys and values")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise refused("its attention is cut into chunks already")
    if set(_rope_types(getattr(config, "rope_parameters", None))) & _LENGTH_DEPENDENT_ROPE:
        raise refused("its rotary embedding depends on the longest row")
    return [layer.sliding_window if layer.is_sliding else None for layer in layers]


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yields the kinds of rotary embeddings that a config names, also those for its layer types."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value) if isinstance(value, dict) else ()


def _allow_recomputation(model: Any) -> None:
    """Lets transformer blocks use their cache while activations are checkpointed.

    transformers forbids this, because its own caches must not be updated twice. A `WindowCache` may be updated twice.
    GPT-2's code drops the cache if the `gradient_checkpointing` flag of the whole model is set. This function clears
    that flag; each block still has its own flag.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for block in blocks:
        block._can_checkpoint_with_cache = True
    if not blocks:
        return
    for module in model.modules():
        if module not in blocks and getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False


def _share_masks(model: Any) -> None:
    """Saves memory in a model that uses torch's attention: layers share one attention mask, and heads are not copied.

    Otherwise, for every window but the first, transformers would copy the keys and values of all earlier tokens for
    each query head, and torch would make a float mask in each layer. Autograd would keep all of them.
    """
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    if chosen != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    AttentionInterface.register(_ATTENTION, _attention)
    AttentionMaskInterface.register(_ATTENTION, _float_mask)
    model.set_attn_implementation(_ATTENTION)


def _float_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """Returns transformers' mask for torch's attention as numbers to add to scores: 0, or -inf for hidden tokens.
    Returns None if no mask is needed."""
    mask: torch.Tensor | None = sdpa_mask(*args, **options)
    if mask is None or mask.dtype != torch.bool:
        return mask
    numbers = torch.zeros(mask.shape, dtype=options.get("dtype", torch.float32), device=mask.device)
    return numbers.masked_fill_(~mask, -torch.inf)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Computes torch's attention as transformers does. On a CPU, query heads share the heads of keys and values, so
    these are not copied; elsewhere torch cannot do this together with a mask."""
    is_plain = options.get("position_bias") is None and options.get("softcap") is None
    if attention_mask is None or query.shape[1] == key.shape[1] or not query.is_cpu or not is_plain:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


class _Kept:
    """Keeps the keys, or the values, of one layer for all tokens of a batch, and the sum of their gradients."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._numbers: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        """The part that the present window computed, with its autograd graph; None before that, or if it needs no
        gradient."""
        self._prefix: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None

    def put_prefix(self, prefix: torch.Tensor, stop: int) -> None:
        """Stores the keys (or values) of virtual tokens that are trained, which end before the token `stop`."""
        self.extended(prefix, 0, stop - prefix.shape[2], is_again=False)
        self._prefix, self.own = self.own, None
        self._anchor = prefix.new_zeros(0).requires_grad_()  # lets autograd record windows that have nothing to train

    def prefix_gradient(self, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns what `put_prefix` stored, with its gradient from all windows; None if there is no such gradient."""
        if self._prefix is None or self._gradients is None:
            return None
        return self._prefix, self._gradients[:, :, stop - self._prefix.shape[2] : stop].to(self._prefix.dtype)

    def extended(self, own: torch.Tensor, first: int, start: int, is_again: bool) -> torch.Tensor:
        """Stores the keys (or values) of the present window, and returns those of the tokens from `first` on.

        Args:
            own: the keys or values of the window's tokens, shape (batch, num_kv_heads, window tokens, head_dim).
            first: the index of the first token to which the window's first token may attend.
            start: the index of the window's first token.
            is_again: whether the same window is computed again for checkpointing, so that nothing may be written:
                autograd has kept the first result.
        """
        if self._numbers is None:
            self._numbers = own.new_empty(*own.shape[:2], self._num_tokens, own.shape[3])
        stop = start + own.shape[2]
        if not is_again:
            with torch.no_grad():
                self._numbers[:, :, start:stop] = own
        if not (torch.is_grad_enabled() and (own.requires_grad or self._anchor is not None)):
            return self._numbers[:, :, first:stop]
        if not is_again and own.requires_grad:
            self.own = own
        given = (own, self._anchor, self, self._numbers, first, start)
        seen: torch.Tensor = _Seen.apply(*given)  # type: ignore[no-untyped-call]
        return seen

    def add_gradient(self, gradient: torch.Tensor, first: int, start: int) -> None:
        """Adds a gradient, shape (batch, num_kv_heads, tokens, head_dim), to the sum for tokens `first` to `start`."""
        if first == start:
            return
        if self._gradients is None:
            # float32, since the sum has a part from every later window
            shape = (*gradient.shape[:2], start, gradient.shape[3])
            self._gradients = torch.zeros(shape, dtype=torch.float32, device=gradient.device)
        self._gradients[:, :, first:start] += gradient

    def taken(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the keys (or values) of the present window and their gradient from later windows, and drops `own`.
        Returns None if there is no such gradient."""
        own, self.own = self.own, None
        if own is None or self._gradients is None:
            return None
        return own, self._gradients[:, :, start:stop].to(own.dtype)


class _Seen(torch.autograd.Function):
    """Returns the keys or values to which a window may attend, as a view, and passes their gradients on."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, anchor: torch.Tensor | None, kept: _Kept, numbers: torch.Tensor, first: int,
        start: int,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the part of `numbers`, all keys or values, from token `first` to the end of the window.

        `own`, the part of the window that begins at token `start`, is already in `numbers`. It is an argument so that
        it gets a gradient. `anchor` is an argument so that autograd calls `backward` even if `own` needs no gradient.
        """
        ctx.kept, ctx.first, ctx.start = kept, first, start
        return numbers[:, :, first : start + own.shape[2]]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        """Returns the gradient of the window's own keys or values, and adds that of earlier ones to `kept`'s sum."""
        num_earlier = ctx.start - ctx.first
        ctx.kept.add_gradient(gradient[:, :, :num_earlier], ctx.first, ctx.start)
        return gradient[:, :, num_earlier:], None, None, None, None, None


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Holds one layer of a `WindowCache`, with the interface that transformers' model code expects."""

    is_croppable = False

    def __init__(self, sliding_window: int | None, num_tokens: int) -> None:
        super().__init__()
        self.is_sliding = sliding_window is not None
        self._sliding_window = sliding_window
        self._kept = (_Kept(num_tokens), _Kept(num_tokens))
        self._start = 0
        self.num_updates = 0

    def begin(self, start: int) -> None:
        self._start, self.num_updates = start, 0

    @property
    def _first(self) -> int:
        return 0 if self._sliding_window is None else max(self._start - self._sliding_window + 1, 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        is_again = self.num_updates > 0
        self.num_updates += 1
        self.is_initialized = True
        return tuple(
            kept.extended(own, self._first, self._start, is_again)
            for kept, own in zip(self._kept, (key_states, value_states), strict=True)
        )

    def taken(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for kept in self._kept:
            found = kept.taken(self._start, stop)
            if found is not None:
                yield found

    def put_prefix(self, keys: torch.Tensor, values: torch.Tensor, stop: int) -> None:
        for kept, given in zip(self._kept, (keys, values), strict=True):
            kept.put_prefix(given, stop)

    def prefix_gradients(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for kept in self._kept:
            found = kept.prefix_gradient(stop)
            if found is not None:
                yield found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length - self._first, self._first

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: memory is taken by the first `update`."""


class WindowCache(Cache):  # type: ignore[misc]
    """Holds the keys and values of a batch that goes through a model window by window, as a cache of transformers."""

    def __init__(self, sliding_windows: Sequence[int | None], num_tokens: int, prefix: Cache | None = None) -> None:
        """Makes a cache without the batch's tokens.

        Args:
            sliding_windows: for each layer, the number of tokens that a token attends to; None means all.
            num_tokens: the number of tokens of each row of the batch.
            prefix: keys and values of virtual tokens in front of each row, as a cache of transformers; None for no
                such tokens. Indices of tokens, below, do not count virtual tokens.
        """
        self.num_virtual = 0 if prefix is None else prefix.get_seq_length()
        super().__init__(layers=[_Layer(window, self.num_virtual + num_tokens) for window in sliding_windows])
        for layer, given in zip(self.layers, [] if prefix is None else prefix.layers, strict=prefix is not None):
            layer.put_prefix(given.keys, given.values, self.num_virtual)

    def begin(self, start: int) -> None:
        """Begins a pass over the window whose first token has the index `start`. Earlier windows must come first."""
        for layer in self.layers:
            layer.begin(self.num_virtual + start)

    def check(self) -> None:
        """Checks, after a pass, that every layer of the model has used this cache.

        Raises:
            ConfigurationError: a layer did not use the cache, so it did not attend to earlier windows.
        """
        if not all(layer.num_updates for layer in self.layers):
            raise ConfigurationError("window_tokens is not possible: not every layer of this model uses its cache")

    def taken(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the keys, and the values, that the last pass computed in each layer, with their gradient from later
        windows.

        Args:
            stop: the end of the window.
        """
        for layer in self.layers:
            yield from layer.taken(self.num_virtual + stop)

    def prefix_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the keys, and the values, of the virtual tokens in each layer, with their gradient from all
        windows."""
        for layer in self.layers:
            yield from layer.prefix_gradients(self.num_virtual)


_LOGITS_AT_ONCE = 1 << 22
"""The number of logits that are computed together if the tenant holds the head: 16 MiB in float32, and three times as
much with their gradient and softmax."""

_Window = tuple[int, int]
"""The token range of a window: (index of the first token, index after the last token)."""
_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]


class Windows:
    """Computes a batch's loss and gradients window by window, with a model that has an adapter.

    Attributes:
        window_tokens: the most tokens of a window, over all rows of the batch.
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
        self._model, self.window_tokens = model, window_tokens
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        check_adapter(model)
        # PEFT's forward method would add a soft prompt to every window
        self._run = self._causal if kind_of(model) else model
        self._padding = run_states(self._causal).padding
        self._sliding_windows = sliding_windows(self._causal)
        _share_masks(self._causal)
        _allow_recomputation(self._causal)
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
        length = max(self.window_tokens // batch, 1)
        windows = [(start, min(start + length, num_tokens)) for start in range(0, num_tokens, length)]
        seeds = [int(seed) for seed in torch.randint(1 << 62, (len(windows),))]
        cache = WindowCache(self._sliding_windows, num_tokens, prompted.prefix)
        again: list[AbstractContextManager[object]] = []
        hidden, last = self._forward(inputs, windows, seeds, cache, again)
        rows = hidden.flatten(0, 1)
        padded = is_padding(inputs["attention_mask"], targets)
        index = self._rows_for_head(targets, padded, every_position)
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
            give_pages_back()
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
                give_pages_back()
        last = self._pass(inputs, windows[-1], seeds[-1], cache)
        return torch.cat([*parts, last.detach()], dim=1), last

    def _pass(self, inputs: _Inputs, window: _Window, seed: int, cache: WindowCache) -> torch.Tensor:
        """Runs one window through the model, and returns the hidden states after the last layer, shape (batch, window
        tokens, hidden size)."""
        start, stop = window
        cache.begin(start)
        device = inputs["labels"].device
        tokens = {name: inputs[name][:, start:stop] for name in ("input_ids", "inputs_embeds") if name in inputs}
        with _random_numbers(seed, device), self._padding.labels_known():
            self._run(
                **tokens, attention_mask=inputs["attention_mask"][:, : cache.num_virtual + stop], past_key_values=cache,
                use_cache=True, logits_to_keep=torch.empty(0, dtype=torch.long, device=device),
            )  # fmt: skip
        cache.check()
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ConfigurationError("window_tokens is not possible: this model does not show its last hidden states")
        return hidden

    def _rows_for_head(self, targets: torch.Tensor, padded: torch.Tensor, every_position: bool) -> torch.Tensor:
        """Returns the indices of the rows for which the head is called, out of all batch · num_tokens rows.

        The provider sees how many rows a remote head gets. These are all rows of each position at which some row has a
        label, without padding, as without windows; or all rows.
        """
        labelled = targets != IGNORE_INDEX
        if every_position:
            labelled = torch.ones_like(labelled)
        elif self._head_is_remote:
            labelled = labelled | (labelled.any(dim=0) & ~padded)
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
        return self.window_tokens if self._head_is_remote else max(_LOGITS_AT_ONCE // vocabulary, 1)

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
