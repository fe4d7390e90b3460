"""This module runs one forward pass over rows of many requests, through transformers' own model code.

All rows form one sequence of shape (1, num_rows). Every part of the model except attention treats each row by itself,
so only attention must know which request a row belongs to. The model uses an attention function that is registered with
transformers under the name "ragged". For each request, this function adds the new keys and values to those of the
request, and lets the request's rows attend only to them.

The step that is being computed is in a context variable, so that engines in several threads do not share it.

Guarantees: a request's logits depend only on its own tokens, up to the rounding of floating-point sums. The module
supports causal attention, with or without a sliding window and soft-capping. Models with any other attention are
refused with an error of one line, so that no answer is wrong. These models are refused: models with other mask shapes,
extra arguments such as attention sinks or position biases, rotary embeddings whose frequencies depend on the longest
row of a batch, and models that keep another state than keys and values.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from tenant_sdk.serving.attention.few_rows import FewRows, RequestRows, split
from tenant_sdk.serving.kv import attention_device
from tenant_sdk.serving.long_attention import attend_in_chunks, takes_chunks
from wire.errors import ConfigurationError

NAME = "ragged"
"""The name of the attention function in transformers' tables."""
_NEEDLESS = frozenset({
    "dropout", "position_ids", "use_cache", "sliding_window", "output_attentions", "output_hidden_states",
    "logits_to_keep", "return_dict", "cache_position", "position_embeddings", "num_items_in_batch",
})  # fmt: skip
"""The arguments that the attention function here ignores. The window comes with the mask that the model asks for."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""The rotary embeddings of transformers 5.23 (`dynamic_rope_update`) that change with the longest position of a
batch."""


@dataclass(frozen=True)
class _Window:
    """Stands in for an attention mask: it holds the number of tokens that a row attends to, or None for all tokens."""

    tokens: int | None


@dataclass(eq=False)
class _Pass:
    """Holds the state of the step that is being computed. Layers with the same window share attention masks.

    Attributes:
        few: the parts of few rows, which the compiled attention computes together; None if there are none.
        others: the first row of each other part, and the part.
        num_seen: the number of tokens that all requests together have before this step.
        masks: the attention masks made so far, by number of rows, number of tokens and window.
        layers: the number of layers whose attention was computed.
    """

    few: FewRows | None
    others: Sequence[tuple[int, RequestRows]]
    num_seen: int
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    layers: int = 0


_PASS: contextvars.ContextVar[_Pass] = contextvars.ContextVar("veilbase_ragged_pass")


class _PassThrough:
    """Stands in for the cache that model code expects. It keeps nothing, since the attention function keeps keys and
    values."""

    is_compileable = False

    def __init__(self, num_seen: int) -> None:
        self._num_seen = num_seen

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return self._num_seen

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0


class RaggedModel:
    """Computes rows of several requests in one pass through a transformers model."""

    def __init__(self, model: Any) -> None:
        """Switches the model to ragged attention. After this, the model can only be used through this object.

        Raises:
            ConfigurationError: the model cannot be used in this way.
        """
        _check_servable(model)
        AttentionInterface.register(NAME, _ragged_attention)
        AttentionMaskInterface.register(NAME, _ragged_mask)
        model.set_attn_implementation(NAME)
        self.model = model
        self._hidden: torch.Tensor | None = None
        model.base_model.register_forward_hook(self._keep_hidden)

    def _keep_hidden(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def forward(
        self, parts: Sequence[RequestRows], token_ids: torch.Tensor, position_ids: torch.Tensor, wanted: torch.Tensor,
        see_hidden: Callable[[torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Computes the logits of some rows of a step.

        Args:
            parts: the requests' shares of the rows, in order.
            token_ids, position_ids: int64, shape (num_rows,).
            wanted: the indices of the rows whose logits are wanted, int64, shape (num_wanted,).
            see_hidden: called with the last hidden states, which the head gets, shape (num_rows, hidden_size).

        Returns:
            Logits, float32, shape (num_wanted, vocab_size), and for each row whether its last hidden state is finite,
            bool, shape (num_rows,).

        Raises:
            ConfigurationError: the model's attention is not what this module supports.
        """
        num_seen = sum(part.position for part in parts)
        few, others = split(parts, self.model.dtype if self.model.device.type == "cpu" else None)
        made = _Pass(few, others, num_seen)
        token = _PASS.set(made)
        try:
            output = self.model(
                input_ids=token_ids[None], position_ids=position_ids[None], past_key_values=_PassThrough(num_seen),
                use_cache=False, logits_to_keep=wanted,
            )  # fmt: skip
        finally:
            _PASS.reset(token)
            hidden, self._hidden = self._hidden, None
        if made.layers != self.model.config.get_text_config(decoder=True).num_hidden_layers or hidden is None:
            raise ConfigurationError("the engine does not serve this model: not all of its layers use its attention")
        if see_hidden is not None:
            see_hidden(hidden[0])
        return output.logits[0].float(), torch.isfinite(hidden[0]).all(dim=-1)


def _check_servable(model: Any) -> None:
    """Checks by a model's config that rows of several requests can share a pass.

    Raises:
        ConfigurationError: the model cannot be served; the error names the reason.
    """
    config = model.config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise ConfigurationError(f"the engine does not serve {kind}: its attention cannot be replaced")
    if set(_rope_types(getattr(config, "rope_parameters", None))) & _LENGTH_DEPENDENT_ROPE:
        raise ConfigurationError(
            f"the engine does not serve this {kind}: its rotary embedding depends on the longest row"
        )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yields the kinds of rotary embeddings that a config names for its layer types."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type", "default"))
        for value in parameters.values():
            yield from _rope_types(value) if isinstance(value, dict) else ()


def _ragged_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Window:
    """Returns the window, which the attention function gets in place of a mask. Model code calls this function for a
    mask.

    Raises:
        ConfigurationError: the mask is neither causal nor causal with a window of `local_size`.
    """
    if not _is_causal(mask_function, local_size):
        raise ConfigurationError("the engine does not serve this model: its attention mask is not causal or a window")
    return _Window(local_size)


def _is_causal(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Returns whether the mask function is causal with this window. Positions near the diagonal and near the window's
    edge are compared."""
    edge = window or 8
    places = torch.tensor(sorted({0, 1, 2, edge - 1, edge, edge + 1, 2 * edge, 2 * edge + 1}))
    rows, columns = places[:, None], places[None, :]
    expected = columns <= rows
    if window is not None:
        expected &= columns > rows - window
    none = torch.zeros((), dtype=torch.int64)
    try:
        return bool((torch.as_tensor(mask_function(none, none, rows, columns)) == expected).all())
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False


def _ragged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, softcap: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Adds the new keys and values of each request to the request's own, and computes the attention of its rows over
    them. Rows with a value that is not finite give NaN.

    Args:
        module: a model's attention layer.
        query: shape (1, num_heads, num_rows, head_dim).
        key, value: shape (1, num_kv_heads, num_rows, head_dim).
        attention_mask: what `_ragged_mask` returned.
        scaling: the factor for the products of queries and keys; None means 1/√head_dim.
        softcap: the bound c of the scaled products p, which become c · tanh(p / c); None means no bound.
        options: other arguments, which are refused if they may change the result.

    Returns:
        The attention's output, shape (1, num_rows, num_heads, head_dim), and None in place of the attention weights.

    Raises:
        ConfigurationError: the model gives another mask, an argument that is not known here, or other heads than its
            config states.
    """
    unknown = [name for name, given in options.items() if name not in _NEEDLESS and given is not None]
    if unknown or not isinstance(attention_mask, _Window):
        said = f"its attention takes {unknown[0]}" if unknown else "it makes attention masks of its own"
        raise ConfigurationError(f"the engine does not serve this model: {said}")
    step = _PASS.get()
    step.layers += 1
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    if step.few is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        step.few.attend(module.layer_idx, query[0], key[0], value[0], output[0], attention_mask.tokens, scale, softcap)
    for begin, part in step.others:
        rows = slice(begin + part.num_unseen, begin + part.num_rows)
        if rows.start == rows.stop:
            continue
        layer, window, new = module.layer_idx, attention_mask.tokens, (key[0, :, rows], value[0, :, rows])
        own = query[0, :, rows].to(attention_device(rows.stop - rows.start, query.device, part.kv.device))
        if takes_chunks(own, part.kv, part.position, window):
            part.kv.write(layer, part.position, *new)
            attended = attend_in_chunks(own, part.kv, layer, part.position, window, scaling, softcap)
        else:
            keys, values = part.kv.update(layer, part.position, *new)
            mask = _mask(step, own.shape[1], keys.shape[1], window, own)
            attended = attend(own, keys, values, mask, scaling, softcap)
        output[0, rows] = attended.transpose(0, 1)
    return output.masked_fill(~_are_finite(query, key, value)[None, :, None, None], torch.nan), None


def _are_finite(*heads: torch.Tensor) -> torch.Tensor:
    """Returns for each row whether its query, key and value are finite, bool, shape (num_rows,).

    torch's attention gives zeros for a product that is NaN, so without this check a lost row would look finite again.
    """
    sums = [each.sum(dim=(0, 1, 3), dtype=torch.float32) for each in heads]
    return torch.isfinite(torch.stack(sums)).all(dim=0)


def _mask(step: _Pass, num_rows: int, num_seen: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """Returns the attention mask of a request's last `num_rows` rows, bool, shape (num_rows, num_seen).

    True means that the row attends to the token. None means that every row attends to every token.
    """
    if num_rows == 1:
        return None
    kind = (num_rows, num_seen, window)
    if kind not in step.masks:
        columns = torch.arange(num_seen, device=like.device)
        rows = columns[-num_rows:, None]
        mask = columns <= rows
        step.masks[kind] = mask if window is None else mask & (columns > rows - window)
    return step.masks[kind]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes the attention of one request's rows.

    Args:
        query: shape (num_heads, num_rows, head_dim).
        keys, values: shape (num_kv_heads, num_seen, head_dim).
        mask: bool, shape (num_rows, num_seen); None if every row attends to every token.
        scaling: the factor for the products of queries and keys; None means 1/√head_dim.
        softcap: see `_ragged_attention`.

    Returns:
        The attention's output, shape (num_heads, num_rows, head_dim).
    """
    num_heads, num_rows, head_dim = query.shape
    num_shared = num_heads // keys.shape[0]
    packed = query.reshape(keys.shape[0], num_shared * num_rows, head_dim)  # Heads that share keys are joined.
    if mask is not None and num_shared > 1:
        mask = mask.repeat(num_shared, 1)
    if softcap is None:
        attended = functional.scaled_dot_product_attention(
            packed[None], keys[None], values[None], attn_mask=mask, scale=scaling
        )[0]
    else:
        products = packed @ keys.transpose(1, 2) * (head_dim**-0.5 if scaling is None else scaling)
        products = softcap * torch.tanh(products / softcap)
        if mask is not None:
            products = products.masked_fill(~mask, -torch.inf)
        attended = torch.softmax(products, dim=-1, dtype=torch.float32).to(values.dtype) @ values
    return attended.reshape(num_heads, num_rows, values.shape[2])
