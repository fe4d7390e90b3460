"""This module keeps the keys and values (KV) of prompts after their requests have ended, so that a later prompt that
begins in the same way is not computed again from its first token.

KV is kept in blocks of 16 tokens. A block belongs to one caller, one adapter (by the digest of its contents) and the
exact tokens of all blocks before it, so prompts with the same beginning share blocks. Only the engine's thread uses a
cache.

Guarantees:
- a request finds only blocks of its own caller and its own adapter, whose tokens all equal those of its prompt. Tokens
  are compared one by one, not by a hash;
- blocks never take more bytes than the budget. The caller with the most bytes loses blocks first, those that were used
  longest ago, so that a caller with many prompts does not drop the blocks of callers that keep less;
- KV of answers is not kept. A provider that lies could choose an answer, and a hit would then show whether a later
  prompt is what the provider guessed;
- in layers with a sliding window, KV is reused only up to a length at which all keys of the window were still kept when
  the request ended.

Not guaranteed: a caller may notice by its own misses how much other callers keep.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tenant_sdk.plain_values import positive
from tenant_sdk.serving.kv import KvLayout, RequestKv
from wire.errors import ConfigurationError

BLOCK_TOKENS = 16
"""The tokens of a block. Hits have lengths of whole blocks, so smaller blocks show more of where prompts differ."""

_BOOKKEEPING_BYTES = 1024
"""The bytes that a block counts beside its KV: those of its key, which holds 16 Python integers, and of its Python
objects, rounded up."""
_Key = tuple[int | str, tuple[int, ...]]
"""The number of the block before (for a first block, the adapter's digest), and the block's own tokens."""


@dataclass(eq=False)
class _Block:
    """Holds the KV of 16 tokens.

    Attributes:
        number: a number that no other block of the cache ever has.
        parts: for each kind of layers (layers with the same window), copies of what `RequestKv.kept` returns, stacked
            over these layers. A kind is missing if its window had passed the tokens.
        num_bytes: the bytes of the budget that the block takes; 0 until the block is in the cache.
    """

    number: int
    parts: dict[int | None, tuple[torch.Tensor, ...]] = field(default_factory=dict, repr=False)
    num_bytes: int = 0


class _Blocks:
    """Holds the blocks of one caller, in the order of their last use. A block always counts as used later than the
    blocks that follow it. So no block follows the one that was used longest ago, which can be dropped alone."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[_Key, _Block] = OrderedDict()
        self.num_bytes = 0

    def path(self, keys: Sequence[tuple[int, ...]], digest: str) -> list[tuple[_Key, _Block]]:
        """Returns the longest run of kept blocks that begin a prompt, and counts these blocks as just used.

        Args:
            keys: the tokens of each block of the prompt.
            digest: the digest of the request's adapter.
        """
        found: list[tuple[_Key, _Block]] = []
        before: int | str = digest
        for tokens in keys:
            block = self.by_key.get((before, tokens))
            if block is None:
                break
            found.append(((before, tokens), block))
            before = block.number
        for key, _ in reversed(found):
            self.by_key.move_to_end(key)
        return found


@dataclass(frozen=True)
class Hit:
    """Holds the kept blocks of the first `num_tokens` tokens of a prompt."""

    num_tokens: int
    _blocks: Sequence[_Block] = field(repr=False)
    _kinds: dict[int | None, list[int]] = field(repr=False)

    def copy_to(self, kv: RequestKv) -> None:
        """Copies the KV into the empty memory of a request."""
        kv.begin_after(self.num_tokens)
        for window, layers in self._kinds.items():
            begin = _first_seen(self.num_tokens, window)
            for number in range(begin // BLOCK_TOKENS, len(self._blocks)):
                start, stop = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
                part = self._blocks[number].parts[window]
                num_left_out = max(begin - start, 0)
                for index, layer in enumerate(layers):
                    places = kv.kept(layer, start + num_left_out, stop) or ()
                    for place, numbers in zip(places, part, strict=True):
                        place.copy_(numbers[index, :, :, num_left_out:])


class PrefixCache:
    """Keeps the KV of prompts of many callers within a budget of bytes."""

    def __init__(self, layout: KvLayout, budget_bytes: int) -> None:
        """Makes an empty cache.

        Args:
            layout: how requests keep KV; blocks keep the same numbers, without rounding them again.
            budget_bytes: the most bytes of all blocks.

        Raises:
            ConfigurationError: the budget does not hold one block.
        """
        if positive("prefix_bytes", budget_bytes) < block_bytes(layout):
            raise ConfigurationError(
                f"prefix_bytes is {budget_bytes}, and {BLOCK_TOKENS} tokens take {block_bytes(layout)}: nothing could "
                "be kept"
            )
        self.budget_bytes = budget_bytes
        self._kinds: dict[int | None, list[int]] = {}
        for layer, window in enumerate(layout.windows):
            self._kinds.setdefault(window, []).append(layer)
        self._callers: dict[str, _Blocks] = {}
        self._next_number = 0
        self.num_bytes = 0
        """The bytes of all blocks."""

    def of(self, caller: str) -> CallerPrefixes:
        """Returns the part of the cache that belongs to a caller."""
        return CallerPrefixes(self, caller)

    def clear(self) -> None:
        """Drops all blocks."""
        self._callers.clear()
        self.num_bytes = 0

    def find(self, caller: str, digest: str, prompt: Sequence[int]) -> Hit | None:
        """Returns the longest hit; see `CallerPrefixes.find`."""
        blocks = self._callers.get(caller)
        if blocks is None:
            return None
        path = [block for _, block in blocks.path(list(_cut(prompt[:-1])), digest)]
        while path and not self._can_end_with(path):
            path.pop()
        return Hit(len(path) * BLOCK_TOKENS, path, self._kinds) if path else None

    def _can_end_with(self, path: Sequence[_Block]) -> bool:
        """Returns whether these blocks hold all KV to which the tokens after them attend."""
        for window in self._kinds:
            begin = _first_seen(len(path) * BLOCK_TOKENS, window)
            if any(window not in block.parts for block in path[begin // BLOCK_TOKENS :]):
                return False
        return True

    def keep(self, caller: str, digest: str, prompt: Sequence[int], kv: RequestKv) -> None:
        """Keeps a prompt's KV; see `CallerPrefixes.keep`."""
        blocks, all_tokens = self._callers.setdefault(caller, _Blocks()), list(_cut(prompt))
        own = {key for key, _ in blocks.path(all_tokens, digest)}
        before: int | str = digest
        # torch raises RuntimeError if it has no memory for a copy. The request itself does not need the copy.
        with contextlib.suppress(RuntimeError, MemoryError):
            for index, tokens in enumerate(all_tokens):
                key = (before, tokens)
                block = blocks.by_key.get(key) or _Block(self._next_number)
                if not self._add_parts(block, self._missing(block, index, kv), blocks, own):
                    break
                if key not in blocks.by_key:
                    blocks.by_key[key] = block
                    self._next_number += 1
                    own.add(key)
                before = block.number
        blocks.path(all_tokens, digest)
        if not blocks.by_key:
            self._callers.pop(caller, None)

    def _missing(self, block: _Block, index: int, kv: RequestKv) -> dict[int | None, list[tuple[torch.Tensor, ...]]]:
        """Returns the KV that a request has and the block lacks, as views for each kind of layers."""
        found = {}
        for window, layers in self._kinds.items():
            kept = [kv.kept(layer, index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS) for layer in layers]
            views = [each for each in kept if each is not None]
            if window not in block.parts and len(views) == len(layers):
                found[window] = views
        return found

    def _add_parts(
        self, block: _Block, missing: dict[int | None, list[tuple[torch.Tensor, ...]]], blocks: _Blocks, own: set[_Key]
    ) -> bool:
        """Copies KV into a block; returns False, and copies nothing, if there is no room."""
        num_bytes = sum(each.nbytes for views in missing.values() for view in views for each in view)
        num_bytes += 0 if block.num_bytes else _BOOKKEEPING_BYTES
        if not self._make_room(num_bytes, blocks, own):
            return False
        block.parts |= {
            window: tuple(torch.stack(same) for same in zip(*views, strict=True)) for window, views in missing.items()
        }
        for counted in (block, blocks, self):
            counted.num_bytes += num_bytes
        return True

    def _make_room(self, num_bytes: int, blocks: _Blocks, own: set[_Key]) -> bool:
        """Drops blocks, first of the caller that has the most bytes, until `num_bytes` are free.

        Returns False if the next block to drop is one of `own`, the keys in `blocks` that are being kept, or if there
        is no block to drop.
        """
        while self.num_bytes + num_bytes > self.budget_bytes:
            largest = max(self._callers, key=lambda caller: self._callers[caller].num_bytes)
            dropped_from = self._callers[largest]
            key = next(iter(dropped_from.by_key), None)
            if key is None or (dropped_from is blocks and key in own):
                return False
            dropped = dropped_from.by_key.pop(key)
            dropped_from.num_bytes -= dropped.num_bytes
            self.num_bytes -= dropped.num_bytes
            if not dropped_from.by_key and dropped_from is not blocks:
                del self._callers[largest]
        return True


def _first_seen(num_tokens: int, window: int | None) -> int:
    """Returns the first position to which a token after `num_tokens` tokens attends."""
    return 0 if window is None else max(num_tokens - window + 1, 0)


def block_bytes(layout: KvLayout) -> int:
    """Returns the bytes of the budget that a block with the KV of all layers takes."""
    return layout.bytes_for(BLOCK_TOKENS) + _BOOKKEEPING_BYTES


def _cut(token_ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the tokens of each whole block."""
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        yield tuple(token_ids[start : start + BLOCK_TOKENS])


@dataclass(frozen=True)
class CallerPrefixes:
    """Gives a request access to the part of a cache that belongs to the request's caller, and to no other part."""

    _cache: PrefixCache = field(repr=False)
    _caller: str = field(repr=False)

    def find(self, digest: str, prompt: Sequence[int]) -> Hit | None:
        """Returns the kept KV of a prompt's first tokens. The last token is never included, since its row has to be
        computed to give the logits.

        Args:
            digest: the digest of the request's adapter.
            prompt: the prompt's token ids.

        Returns:
            The longest hit, or None if there is none.
        """
        return self._cache.find(self._caller, digest, prompt)

    def keep(self, digest: str, prompt: Sequence[int], kv: RequestKv) -> None:
        """Keeps a copy of a prompt's KV, as far as there is room.

        Args:
            digest: the digest of the request's adapter.
            prompt: the prompt's token ids.
            kv: the request's keys and values, with all tokens of the prompt computed.
        """
        self._cache.keep(self._caller, digest, prompt, kv)
