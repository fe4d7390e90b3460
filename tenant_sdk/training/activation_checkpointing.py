"""This module saves memory for activations in a training run (activation checkpointing): it chooses how, and computes
transformer blocks again in the backward pass.

There are three modes. With None nothing is computed twice: the forward pass keeps everything that the backward pass
needs. With `replies` the backward pass computes each transformer block again, from stored replies of the provider. With
`recompute` it computes each block again and asks the provider again, which adds about half to the traffic. `auto`
chooses the first of these three that fits.

With `replies` the first run of a block stores every forward product that the block got from the provider, and the
second run takes the products from the store. Norms, activations and adapters are computed again. The results of two
operations that cost much to compute again and little to keep are stored too: attention, and products that are much
narrower than their input, such as those of LoRA's A. These results take about a seventh of the memory of the provider's
products. Attention over a long row takes most of the time of computing a block again.

Replies beyond a budget of memory go to a temporary file without a name, encrypted with AES-256-GCM, which also detects
changes. The replies are unmasked activations, so nobody who gets the disk may be able to read them.

`give_pages_back`, after each run of a block, makes a step's savings show in the process's resident memory, where
glibc's malloc would keep the pages of freed tensors.

Guarantees:
- the choice depends on the model's shapes, the longest batch, free memory and free disk, and on nothing that a row
  says. It is made once, before a run sends rows;
- with `replies` a run sends exactly the calls of a run without checkpointing. The second run gets bit-equal products,
  also under a mask whose results differ slightly from call to call. A backward pass can run once for each forward pass;
- results of the two operations come back bit for bit, in the layout in memory that they had. If the block runs an
  operation in only one of its two runs, the other operations still get their own results. A result that was not kept,
  because the store has no room for it or because the operation is another one (one on a GPU, or attention with
  dropout), is computed again, which gives the same numbers;
- the key of the file is drawn from the operating system when a store is made, is only in memory, and is used by this
  store alone. No nonce is used twice: the nonce is the number of the stored reply, which counts up;
- a forked child drops the key and its handle of the file, and can neither read nor write;
- the file has no name once it is open, so it disappears when the process ends. If stored bytes have changed, reading
  them is an error, so no gradient is wrong. `reserve` takes the space on disk, so a full disk shows before a step and
  not during it.

Not guaranteed: that memory is not swapped out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from noise.blocks.row_file import bytes_of, write_all
from noise.disk.private_files import is_in_memory, make_private_folder
from runtime.memory import free_memory
from tenant_sdk.kinds.register import features_of_kinds
from tenant_sdk.model.dora import features_of_dora
from tenant_sdk.model.padding import Attended, Padding
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import ProductSource, RunStates, run_states
from wire.errors import ConfigurationError, StorageError

_PIECE_BYTES = 1 << 20
"""The bytes that are encrypted and written at a time, so that a reply of any size needs one small buffer."""
_KEY_BYTES = 32
_NONCE_BYTES = 12
_INSTEAD = (
    "choose another memory_budget_mb or checkpointing='recompute' (--memory-budget-mb, --checkpointing)"
)  # fmt: skip
"""What errors advise where the disk of a step's replies cannot be used."""


class KeptReply(ABC):
    """Holds one stored reply. If this object is deleted, the store forgets the reply."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """Returns the reply, bit for bit as it was stored.

        Raises:
            StorageError: the file cannot be read, or its bytes have changed.
        """


class ReplyStore:
    """Keeps replies, or other tensors, in memory up to a budget, and beyond the budget in an encrypted file."""

    def __init__(
        self, memory_bytes: int, folder: Path, name: str = "the store of replies", instead: str = _INSTEAD
    ) -> None:  # fmt: skip
        """Makes an empty store; the file is made when it is first needed.

        Args:
            memory_bytes: the most bytes of replies in memory; with 0 all go to the file.
            folder: the folder on whose disk the file is made.
            name, instead: what errors call the store, and what they advise where its disk cannot be used.
        """
        self.memory_bytes, self._folder, self._name, self._instead = memory_bytes, folder, name, instead
        self._in_memory = self._on_disk = 0  # bytes of the replies that are kept now; on disk, their number
        self._end = self._reserved = 0  # the file's next free byte, and its size
        self._extra_bytes = 0  # how many bytes `keep_extra` may still take
        self._num_records = 0
        self._key = bytearray(os.urandom(_KEY_BYTES))
        self._file: IO[bytes] | None = None
        self._piece = bytearray(0)
        self._lock = threading.RLock()  # a dropped reply may free its place while this thread is in here
        _STORES.add(self)

    def reserve(self, num_bytes: int, extra_bytes: int = 0) -> None:
        """Reserves space on disk for the part of a step's replies that does not fit into memory.

        Args:
            num_bytes: the bytes of the replies that the step will keep.
            extra_bytes: the bytes that `keep_extra` may take in this step, in addition.

        Raises:
            StorageError: the disk has no room for them.
        """
        with self._lock:
            self._extra_bytes = extra_bytes
            beyond = num_bytes + extra_bytes - (self.memory_bytes - self._in_memory)
            if beyond > 0:
                self._grow(self._end + beyond)

    def keep(self, reply: torch.Tensor) -> KeptReply:
        """Keeps a copy of a reply.

        Args:
            reply: any dtype, shape and device.

        Raises:
            StorageError: the disk has no room for it.
        """
        num_bytes = reply.numel() * reply.element_size()
        with self._lock:
            if self._in_memory + num_bytes <= self.memory_bytes:
                self._in_memory += num_bytes
                return _InMemory(self, reply.clone(), num_bytes)
            return self._write(reply, num_bytes)

    def keep_extra(self, tensor: torch.Tensor) -> KeptReply | None:
        """Keeps a copy of a tensor like a reply, if `reserve` left room for such tensors; returns None otherwise.

        Raises:
            StorageError: the file cannot be written.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            if num_bytes > self._extra_bytes:
                return None
            self._extra_bytes -= num_bytes
            return self.keep(tensor)

    def _write(self, reply: torch.Tensor, num_bytes: int) -> _OnDisk:
        start, number = self._end, self._num_records
        self._grow(start + num_bytes)
        self._num_records += 1
        plain = bytes_of(reply.detach().cpu())
        with self._disk() as file:
            encryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(number))).encryptor()
            for begin in range(0, num_bytes, _PIECE_BYTES):
                part = plain[begin : begin + _PIECE_BYTES]
                encryptor.update_into(part, self._piece)
                write_all(file.fileno(), memoryview(self._piece)[: len(part)], start + begin)
            encryptor.finalize()
        self._end = start + num_bytes  # a reply that was dropped meanwhile may have set it to 0
        self._on_disk += 1
        return _OnDisk(self, number, start, encryptor.tag, reply)

    def read(self, number: int, start: int, tag: bytes, into: torch.Tensor) -> None:
        """Fills a tensor with a reply from the file.

        Args:
            number: the number of the reply, from which its nonce follows.
            start: the offset of its first byte in the file.
            tag: the authentication tag of AES-GCM.
            into: the tensor, of the reply's shape and dtype, on the CPU.

        Raises:
            StorageError: the file cannot be read, or its bytes are not those that were written.
        """
        plain = bytes_of(into)
        with self._lock, self._disk() as file:
            decryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(number), tag)).decryptor()
            for begin in range(0, len(plain), _PIECE_BYTES):
                part = plain[begin : begin + _PIECE_BYTES]
                encrypted = memoryview(self._piece)[: len(part)]
                if os.preadv(file.fileno(), [encrypted], start + begin) != len(part):
                    raise StorageError(f"{self._name} in {self._folder} is damaged: it is too short")
                decryptor.update_into(encrypted, part)
            try:
                decryptor.finalize()
            except InvalidTag:
                raise StorageError(
                    f"{self._name} in {self._folder} is damaged: it gave back other bytes than were written"
                ) from None

    def _grow(self, size: int) -> None:
        if size <= self._reserved:
            return
        with self._disk() as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._reserved = size

    @contextlib.contextmanager
    def _disk(self) -> Iterator[IO[bytes]]:
        """Yields the open file, and turns the operating system's errors into `StorageError`."""
        try:
            if self._file is None:
                make_private_folder(self._folder)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed in `close`
                self._piece = bytearray(_PIECE_BYTES)
            yield self._file
        except (OSError, ValueError) as exc:  # ValueError: the file was closed
            reason = exc.strerror if isinstance(exc, OSError) else "it was closed"
            raise StorageError(
                f"{self._name} in {self._folder} cannot be used ({reason}): make room there, or {self._instead}"
            ) from None

    def forget(self, in_memory: int = 0, on_disk: int = 0) -> None:
        """Forgets replies that were taken or dropped: `in_memory` bytes in memory, and `on_disk` replies on disk."""
        with self._lock:
            self._in_memory -= in_memory
            self._on_disk -= on_disk
            if self._on_disk == 0:
                self._end = 0  # the next step writes from the file's beginning, under new nonces

    @property
    def bytes_on_disk(self) -> int:
        """Returns the size of the store's file."""
        return self._reserved

    def close(self) -> None:
        """Closes the file, which removes it, and drops the key; kept replies on disk are lost."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._key[:] = bytes(len(self._key))
            self._key = bytearray()  # no cipher takes an empty key

    def forget_in_child(self) -> None:
        """Closes the store in a forked child."""
        self._lock = threading.RLock()  # a thread that held the old one is not in this process
        self.close()


_STORES: weakref.WeakSet[ReplyStore] = weakref.WeakSet()


def _forget_in_child() -> None:
    for store in list(_STORES):
        store.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


class _InMemory(KeptReply):
    def __init__(self, store: ReplyStore, reply: torch.Tensor, num_bytes: int) -> None:
        self._store, self._reply, self._num_bytes = store, reply, num_bytes

    def take(self) -> torch.Tensor:
        return self._reply

    def __del__(self) -> None:
        self._store.forget(in_memory=self._num_bytes)


class _OnDisk(KeptReply):
    def __init__(self, store: ReplyStore, number: int, start: int, tag: bytes, like: torch.Tensor) -> None:
        self._store, self._place = store, (number, start, tag)
        self._form: dict[str, Any] = {"dtype": like.dtype}
        self._shape, self._device = like.shape, like.device

    def take(self) -> torch.Tensor:
        reply = torch.empty(self._shape, **self._form)
        self._store.read(*self._place, reply)
        return reply.to(self._device)

    def __del__(self) -> None:
        self._store.forget(on_disk=1)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCT = torch.ops.aten.mm.default
_COSTLY_CALLS = frozenset({
    functional.scaled_dot_product_attention, functional.linear, torch.matmul, torch.mm, torch.Tensor.matmul,
    torch.Tensor.mm, torch.Tensor.__matmul__,
})  # fmt: skip
"""The functions of torch's interface in Python that run these two operations."""
_NARROW = 8
"""A product is kept if it has at most 1/8 of the columns of its input."""
_SUM_BYTES = 4
"""The bytes of the float32 number that attention gives for each head and token, besides its output."""


Operation = tuple[Any, ...]
"""Identifies an operation of a block: the function, the weight's address (0 for attention), and the shape and type of
each tensor argument. A kept result holds the weight's memory, so that no other weight can get the same address:
autocast and some kinds of adapters make new weights in each run."""


@dataclass(frozen=True)
class _Kept:
    """Holds a kept tensor, the order of its dimensions in memory, and the memory of a product's weight."""

    reply: KeptReply
    order: tuple[int, ...]
    weight: torch.UntypedStorage | None

    def take(self) -> torch.Tensor:
        stored = self.reply.take()
        return stored.permute([self.order.index(each) for each in range(len(self.order))])


Results = deque[tuple[Operation, list[_Kept] | None]]
"""The operations of one block in their order, with their results. None stands for a result that was not kept."""


def _operation(func: Any, args: tuple[Any, ...]) -> Operation:
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    weight = args[1].data_ptr() if func is _PRODUCT else 0
    return func, weight, *((each.shape, each.dtype) for each in tensors)


def _is_costly(func: Any, args: tuple[Any, ...]) -> bool:
    return func is _ATTENTION or (func is _PRODUCT and args[0].is_cpu and _is_narrow(*args[1].shape))


def _is_narrow(in_features: int, out_features: int) -> bool:
    return out_features * _NARROW <= in_features


class _InCostlyCalls(TorchFunctionMode):
    """Turns a dispatch mode on inside those of torch's functions that may run a costly operation. Leaving the mode on
    for all operations would add four times as much time."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COSTLY_CALLS:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


class _Keeping(TorchDispatchMode):
    def __init__(self, store: ReplyStore, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._results = store, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_costly(func, args):
            weight = args[1].untyped_storage() if func is _PRODUCT else None
            self._results.append((_operation(func, args), self._keep(result if weight is None else (result,), weight)))
        return result

    def _keep(self, tensors: tuple[torch.Tensor, ...], weight: torch.UntypedStorage | None) -> list[_Kept] | None:
        found = []
        for each in tensors:
            strides = each.stride()
            order = tuple(sorted(range(each.dim()), key=lambda place: -strides[place]))
            reply = self._store.keep_extra(each.permute(order))
            if reply is None:
                return None
            found.append(_Kept(reply, order, weight))
        return found


class _HandingOut(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._next(_operation(func, args)) if _is_costly(func, args) else None
        if kept is None:
            return func(*args, **(kwargs or {}))
        tensors = tuple(each.take() for each in kept)
        return tensors[0] if func is _PRODUCT else tensors

    def _next(self, operation: Operation) -> list[_Kept] | None:
        """Returns the operation's result, and forgets those before it, which the second run left out; None if there is
        no such operation, or its result was not kept."""
        while any(each == operation for each, _ in self._results):
            found, kept = self._results.popleft()
            if found == operation:
                return kept
        return None


def _keeping_results(store: ReplyStore, results: Results) -> TorchFunctionMode:
    """Returns a context in which results of costly operations are kept in `store`, and appended to `results`."""
    return _InCostlyCalls(_Keeping(store, results))


def _handing_out_results(results: Results) -> TorchFunctionMode:
    """Returns a context in which costly operations return the results at the beginning of `results`, and remove them
    there, in place of computing."""
    return _InCostlyCalls(_HandingOut(results))


def bytes_per_row(model: Any) -> int:
    """Returns the bytes that the results of all blocks take for each token, on a CPU; elsewhere nothing is kept.

    Args:
        model: a model of transformers, with or without adapters in it.
    """
    if model.device.type != "cpu":
        return 0
    config, item_bytes = model.config.get_text_config(), model.dtype.itemsize
    num_heads = int(getattr(config, "num_attention_heads", 0))
    head_dim = getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", 0)) // max(num_heads, 1)
    attention: int = int(getattr(config, "num_hidden_layers", 1)) * num_heads * (head_dim * item_bytes + _SUM_BYTES)
    narrow = sum(
        int(each.out_features) * each.weight.dtype.itemsize
        for each in model.modules()
        if isinstance(each, nn.Linear)
        and not isinstance(each, RemoteLinear)
        and _is_narrow(each.in_features, each.out_features)
    )
    return attention + narrow


class KeptReplies:
    """Makes the two contexts in which torch's activation checkpointing runs a block (torch's `context_fn`)."""

    def __init__(self, store: ReplyStore, states: RunStates) -> None:
        """Uses `store` for the replies of all blocks of the model that has these run states."""
        self._store, self._states = store, states

    def contexts(self) -> tuple[Any, Any]:
        """Returns two contexts: one for the first run, which stores replies, and one for the second, which uses
        them."""
        kept: deque[KeptReply] = deque()
        results: Results = deque()

        first = _within(self._states.products_from(_Keeps(self._store, kept)), _keeping_results(self._store, results))
        return first, self._handing_out(kept, results, self._states.padding.attended)

    @contextlib.contextmanager
    def _handing_out(self, kept: deque[KeptReply], results: Results, attended: Attended | None) -> Iterator[None]:
        source, padding = self._states.products_from(_HandsOut(kept)), self._states.padding
        try:
            with source, padding.within(attended), _handing_out_results(results):
                yield
        finally:  # torch ends the second run as soon as it has what it needs
            kept.clear()
            results.clear()


class _Keeps(ProductSource):
    def __init__(self, store: ReplyStore, kept: deque[KeptReply]) -> None:
        self._store, self._kept = store, kept

    def keep(self, product: torch.Tensor) -> None:
        """Keeps what the provider answered in the first run of a block."""
        self._kept.append(self._store.keep(product))


class _HandsOut(ProductSource):
    def __init__(self, kept: deque[KeptReply]) -> None:
        self._kept = kept

    def given(self, shape: tuple[int, int]) -> torch.Tensor:
        """Returns the next of the products that were kept."""
        if not self._kept:
            raise StorageError("a block asked for more products in the backward pass than in the forward pass")
        product = self._kept.popleft().take()
        if product.shape != shape:
            raise StorageError("a block asked for other products in the backward pass than in the forward pass")
        return product


@contextlib.contextmanager
def _within(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


_LOGGER = logging.getLogger(__name__)
_KEPT = 1.2
"""The estimate of what a step without checkpointing keeps for each token, as a multiple of all base layers' inputs and
outputs: autograd's saved tensors of SmolLM2 with LoRA on all layers are 1.0 times those."""
_KEPT_WITH_DROPOUT = 1.8
"""The same estimate if an adapter has dropout, which keeps a copy of its input."""
_SPARE_DISK_BYTES = 256 << 20
"""What is left of the disk for checkpoints if replies need not be there."""
_SHARE_OF_MEMORY = 0.5
"""The part of the free memory that a run may use if the tenant names no budget."""
TRIM_SHARE = 0.02
"""The part of the time that `give_pages_back` may take. It takes about 12 ms in a heap of some hundred MB."""
_trim_lock = threading.Lock()
_next_trim = 0.0


@dataclass(frozen=True)
class Estimate:
    """Holds estimates of a step's memory for its longest batch, in bytes.

    Attributes:
        plain: what a step without checkpointing keeps until its backward pass.
        working: what a step with checkpointing keeps, apart from replies: the inputs of all transformer blocks, and
            the autograd graph of one block.
        replies: the provider's replies for all blocks.
        results: what is kept beside the replies (tenant_sdk/training/activation_checkpointing.py).
    """

    plain: int
    working: int
    replies: int
    results: int

    @property
    def stored(self) -> int:
        """Returns the bytes that `replies` stores for the batch."""
        return self.replies + self.results


def estimate(base: Any, num_rows: int, has_dropout: bool) -> Estimate:
    """Returns an estimate of the memory that a training step takes for a batch.

    Args:
        base: the model, whose layers may have adapters.
        num_rows: the batch's rows times their length, in tokens.
        has_dropout: whether an adapter has dropout.
    """
    layers = list(_remote(base.base_model))
    item_bytes = base.dtype.itemsize
    outputs = sum(shape[1] for shape in layers) * item_bytes
    both = sum(sum(shape) for shape in layers) * item_bytes
    config = base.config.get_text_config()
    num_blocks = max(1, int(getattr(config, "num_hidden_layers", 1)))
    kept = both * (_KEPT_WITH_DROPOUT if has_dropout else _KEPT)
    inputs = int(getattr(config, "hidden_size", 0)) * num_blocks * item_bytes
    for kept_by_kind, second_outputs in (features_of_dora(base), features_of_kinds(base)):
        kept, outputs = kept + kept_by_kind * item_bytes, outputs + second_outputs * item_bytes
    return Estimate(
        int(num_rows * kept), int(num_rows * (inputs + kept / num_blocks)), num_rows * outputs,
        num_rows * bytes_per_row(base),
    )  # fmt: skip


def _remote(model: Any) -> Iterable[tuple[int, int]]:
    """Yields (in_features, out_features) of each remote layer, also of layers that share one input."""
    for module in model.modules():
        if isinstance(module, RemoteLinear):
            yield module.in_features, module.out_features
        elif isinstance(module, RemoteConv1D):
            yield module.nx, module.nf


def has_dropout(model: Any) -> bool:
    """Returns whether a module of the model drops values out in training."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


class Checkpointing:
    """Holds the mode of one run, and the store of the provider's replies if the mode is `replies`."""

    def __init__(self, mode: str | None, store: ReplyStore | None, stored_per_row: tuple[int, int] = (0, 0)) -> None:
        """Keeps what `choose` found; `stored_per_row` is the size of all replies for one token, and the size of what is
        kept beside them, in bytes."""
        self.mode, self.store = mode, store
        self._stored_per_row = stored_per_row

    def before_step(self, num_rows: int) -> None:
        """Reserves room in the store for the replies of the next forward pass.

        Args:
            num_rows: the batch's rows times their length, in tokens.

        Raises:
            StorageError: the disk has no room.
        """
        if self.store is not None:
            self.store.reserve(*(num_rows * each for each in self._stored_per_row))

    def turn_on(self, base: Any) -> None:
        """Turns checkpointing on in a model without adapters, or in the base model of a model with adapters.

        This does what Trainer's `gradient_checkpointing` does, except that the embeddings' output gets no gradient.
        With such a gradient, the layers below the lowest adapter would send backward calls to the provider too.
        Checkpointing that is not re-entrant, which is used here, does not need such a gradient.

        Raises:
            ConfigurationError: the architecture has no activation checkpointing.
        """
        if self.mode is None:
            return
        states = run_states(base)
        kept = None if self.store is None else KeptReplies(self.store, states)

        def contexts() -> tuple[Any, Any]:
            if kept is None:
                return _GivingBack(), _SecondRun(states.padding)
            first, second = kept.contexts()
            return _within(_GivingBack(), first), _within(_GivingBack(), second)

        options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
        try:
            base.activation_checkpointing_enable(options)
        except ValueError as exc:
            raise ConfigurationError(
                f"{type(base).__name__} does not support gradient_checkpointing: use checkpointing=None"
            ) from exc
        base.disable_input_require_grads()

    def close(self) -> None:
        """Removes the store's file and drops its key."""
        if self.store is not None:
            self.store.close()


class _GivingBack:
    """Gives pages back when the context ends, however it ends: torch leaves a block's second run by an exception. The
    context can be entered again and again, as torch does for several backward passes over one graph."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        give_pages_back()


class _SecondRun(_GivingBack):
    """Leaves out the padding that the first run of a block leaves out, in which this is made."""

    def __init__(self, padding: Padding) -> None:
        self._run = padding.within(padding.attended)

    def __enter__(self) -> None:
        self._run.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._run.__exit__(None, None, None)
        super().__exit__()


def give_pages_back() -> None:
    """Returns the pages of freed tensors to the system, if malloc is glibc's, which keeps them until then.

    Each run of a transformer's block ends with this. Then the tensors of the next run take pages anew, but only once,
    however often they are freed within the run. With thresholds at which malloc gives back each tensor's pages
    (`mallopt`), page faults made a step half as slow again. The call does nothing while the calls before it took more
    than `TRIM_SHARE` of the time, or while another thread is in it.
    """
    global _next_trim
    trim = glibc_malloc_trim()
    if trim is None or time.monotonic() < _next_trim or not _trim_lock.acquire(blocking=False):
        return
    try:
        began = time.monotonic()
        trim(0)
        now = time.monotonic()
        _next_trim = now + (now - began) / TRIM_SHARE
    finally:
        _trim_lock.release()


@functools.cache
def glibc_malloc_trim() -> Any:
    """Returns glibc's function `malloc_trim`; None with a libc that has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def choose(
    mode: str | None,
    base: Any,
    num_rows: int,
    has_dropout: bool,
    memory_budget_mb: float | None,
    folder: Path,
    taken_bytes: int = 0,
) -> Checkpointing:
    """Returns the checkpointing of a run.

    Args:
        mode: the result of `resolve`; `auto` chooses the cheapest that fits.
        base: the model without adapters.
        num_rows: the longest batch's rows times their length, in tokens.
        has_dropout: whether an adapter has dropout.
        memory_budget_mb: the memory that a step's activations may take, in MB. With None it is half of the free memory
            for `auto`; `replies`, which is asked for by name to save memory, then puts all replies on disk if they fit.
        folder: a folder on the disk that takes the replies that are not held in memory.
        taken_bytes: what else will be written there before the run's first step.

    Raises:
        StorageError: the mode is `replies`, and the disk has no room for them.
    """
    room = free_disk(folder) - taken_bytes
    need = estimate(base, num_rows, has_dropout)
    free = free_memory() or 0  # What is unknown counts as none, so that the run saves memory.
    budget = int(memory_budget_mb * 1e6) if memory_budget_mb is not None else int(free * _SHARE_OF_MEMORY)
    in_memory = max(0, budget - need.working)
    if mode == "replies" and memory_budget_mb is None:
        is_roomy = need.stored * 1.2 + _SPARE_DISK_BYTES <= room
        if is_roomy and not is_in_memory(folder):
            in_memory = 0
        else:
            why = "has little room" if not is_roomy else "is memory, too (tmpfs)"
            _LOGGER.warning("replies fill half of the free memory before the disk: that of %s %s", folder, why)
    if mode == "auto":
        mode = None if need.plain <= budget or not base.supports_gradient_checkpointing else "replies"
        if mode == "replies" and need.stored - in_memory > room:
            mode = "recompute"
    if mode != "replies":
        return Checkpointing(mode, None)
    if need.stored - in_memory > room:
        raise StorageError(
            f"expected {(need.stored - in_memory) / 1e6:.0f} MB of free disk for replies at {folder}, got "
            f"{max(room, 0) / 1e6:.0f}: make room, or choose checkpointing='recompute' (--checkpointing)"
        )
    per_row = need.replies // max(1, num_rows), need.results // max(1, num_rows)
    return Checkpointing(mode, ReplyStore(in_memory, folder), per_row)


def free_disk(folder: Path) -> int:
    """Returns the free bytes of the disk on which a folder is or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        return shutil.disk_usage(there).free if os.access(there, os.W_OK) else 0
    except OSError:
        return 0
