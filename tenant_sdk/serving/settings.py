"""This module defines the options of an engine, of a request to it and of a store of adapters, each of them once.

| options | keyword arguments of | flags of |
|---|---|---|
| `EngineOptions` | `Engine`, `TenantClient.generate_many`, `Endpoint`, `TenantClient.serve` | `tenant serve` |
| `RequestOptions` | `Engine.submit`, `TenantClient.generate_many` | |
| `StoreOptions` | `AdapterStore`, `Endpoint`, `TenantClient.serve`; in part `generate_many` | `tenant serve`, `chat` |

The tables in docs/serving.md are made from all three. Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tenant_sdk.adapter_checks import CONFIG, NAME
from tenant_sdk.options import from_keywords, told
from tenant_sdk.plain_values import WrongOption, positive, true_or_false
from tenant_sdk.serving.scheduler import Budget
from tenant_sdk.training.checkpoints import check_writable
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from tenant_sdk.serving.adapters.catalogue import Catalogue
    from tenant_sdk.serving.sampling import LogitsHook
    from tenant_sdk.serving.speculation.settings import Speculation

MOST_PLACES = 64
"""The most places on the device for adapters of one rank. A place without rows costs 3 µs in each layer's
`grouped_mm`."""
KV_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
"""The types in which keys and values may be kept, and the names that torch has for them."""
_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Holds the options of an engine that are the same wherever it is opened.

    Attributes:
        max_running: the most requests that are answered at a time.
        kv_bytes: the most bytes of keys and values of all running requests; requests that do not fit wait. Those of a
            request grow with its answer. If they no longer fit, the request that began last waits and is computed again
            later.
        kv_dtype: the type in which keys and values are kept: fp32, bf16 or fp8.
        kv_device: where keys and values are kept. "cpu" keeps them in host memory if the model is on a device, and
            computes the attention of answers there; None keeps them on the model's device.
        max_context: the most tokens of a request, prompt and answer together; None means the model's context.
        step_tokens: the most rows of a step. Long prompts are computed in pieces, so that answers do not wait for them.
        overtaking_s: the seconds for which small requests may overtake a request that needs more KV than is free.
        speculation: whether and how tokens are drafted at the tenant, so that a step may give several tokens of an
            answer; None drafts nothing.
        prefix_bytes: the most bytes of keys and values of prompts that are kept after their requests, beside kv_bytes,
            for later prompts of the same caller and adapter that begin in the same way. The provider sees a hit as a
            shorter prompt. 0 keeps none.
    """

    max_running: int = field(default=16, metadata=told("answers at a time", "Limits", kind=int))
    kv_bytes: int = field(
        default=1 << 30,
        metadata=told(
            "bytes of keys and values of all running requests", "Limits", shown="1 GiB", unit="BYTES", kind=int
        ),
    )
    kv_dtype: str = field(
        default="fp32",
        metadata=told(
            "type in which keys and values are kept: fp32, bf16 or fp8", "Limits", page="long-context.md", kind=str
        ),
    )
    kv_device: str | None = field(
        default=None,
        metadata=told(
            "cpu keeps keys and values in host memory where the model is on a device",
            "Limits",
            shown="the model's",
            page="long-context.md",
            kind=str,
        ),
    )
    max_context: int | None = field(
        default=None,
        metadata=told(
            "tokens of a request, prompt and answer together",
            "Limits",
            shown="the model's",
            unit="TOKENS",
            page="long-context.md",
            kind=int,
        ),
    )
    step_tokens: int = field(
        default=256, metadata=told("rows of a step; long prompts are computed in pieces", "Limits", kind=int)
    )
    overtaking_s: float = field(
        default=2.0,
        metadata=told("seconds for which small requests may overtake one that needs more memory than is free"),
    )
    speculation: Speculation | None = field(
        default=None, metadata=told("how tokens are drafted, so that a step may give several", shown="none")
    )
    prefix_bytes: int = field(
        default=0, metadata=told("bytes of kept prompts beside `kv_bytes`; the provider sees hits", shown="none")
    )

    def check(self) -> None:
        """Raises ConfigurationError for a value that no model is needed to refuse."""
        Budget(self.step_tokens, self.max_running, self.kv_bytes, self.overtaking_s)  # which checks them
        if self.kv_dtype not in KV_DTYPES:
            raise WrongOption(f"kv_dtype is one of {', '.join(KV_DTYPES)}, got {ascii(self.kv_dtype)[:40]}", "kv_dtype")
        if self.kv_device not in (None, "cpu"):
            raise WrongOption(
                f'kv_device is None, the model\'s device, or "cpu", got {ascii(self.kv_device)[:40]}', "kv_device"
            )
        if self.max_context is not None:
            positive("max_context", self.max_context)
        if self.prefix_bytes != 0:
            positive("prefix_bytes", self.prefix_bytes)


class EngineKeywords(TypedDict, total=False):
    """Gives the fields of `EngineOptions` to type checkers, as keyword arguments."""

    max_running: int
    kv_bytes: int
    kv_dtype: str
    kv_device: str | None
    max_context: int | None
    step_tokens: int
    overtaking_s: float
    speculation: Speculation | None
    prefix_bytes: int


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Holds the options of one request to an engine.

    Attributes:
        do_sample: whether tokens are drawn; otherwise the likeliest token is taken.
        temperature: as in transformers, above 0. None takes the value of the checkpoint's generation settings, or
            transformers' default if they have none; the same holds for the next three arguments.
        top_k: the number of likeliest tokens among which one is drawn; 0 means all tokens.
        top_p: the total probability of the likeliest tokens among which one is drawn.
        repetition_penalty: a factor; above 1, it makes repetitions rarer.
        seed: the seed of this answer's own random numbers; None takes an unpredictable seed.
        stop: strings at which the text ends, and which it does not include; at most 4,096 characters together.
            They may hold special tokens, such as `<|im_end|>`.
        eos_token_id: tokens at which the text ends; None means those of the model.
        logits_processor: functions of (token ids, logits), such as a grammar, called in the engine's thread.
        fixed_length: whether the rows go on to the length limit after the text has ended. Such a request neither
            uses nor leaves a kept prompt, and is refused by an engine with speculation.
        on_text: called in the engine's thread with each piece of text; it must return quickly.
        caller: the party that the request is for. Of the waiting requests, those of the caller with the fewest
            running requests are admitted first. Prompts (`prefix_bytes`) are kept for each caller separately.
        pools: whether the answer also gets the mean of the last hidden states of the prompt's tokens
            (`Answer.mean_hidden`). Such a request neither uses nor leaves a kept prompt.
    """

    do_sample: bool = field(default=False, metadata=told("draw tokens; otherwise the likeliest token is taken"))
    temperature: float | None = field(
        default=None, metadata=told("as in transformers, whose code applies it", shown="the checkpoint's")
    )
    top_k: int | None = field(
        default=None, metadata=told("the number of likeliest tokens to draw from; 0 for all", shown="the checkpoint's")
    )
    top_p: float | None = field(
        default=None, metadata=told("the total probability of the tokens to draw from", shown="the checkpoint's")
    )
    repetition_penalty: float | None = field(
        default=None, metadata=told("above 1, it makes repetitions rarer", shown="the checkpoint's")
    )
    seed: int | None = field(
        default=None,
        metadata=told(
            "of the request's own random numbers: with it, the tokens are those of `torch.manual_seed(seed)` and "
            "`generate`",
            shown="unpredictable",
        ),
    )
    stop: str | Sequence[str] = field(
        default=(),
        metadata=told(
            "strings at which the text ends; they are not part of it, and no piece of them is handed out before"
        ),
    )
    eos_token_id: int | Sequence[int] | None = field(
        default=None, metadata=told("tokens at which the text ends", shown="the model's")
    )
    logits_processor: Sequence[LogitsHook] = field(
        default=(),
        repr=False,
        metadata=told("functions of (token ids, logits), such as a grammar, or transformers' own"),
    )
    fixed_length: bool = field(
        default=False, metadata=told("the rows go on to the length limit, wherever the text ends")
    )
    on_text: Callable[[str], None] | None = field(
        default=None,
        repr=False,
        metadata=told("called with each piece, in the engine's thread: it has to return quickly"),
    )
    caller: str = field(
        default="",
        repr=False,
        metadata=told("the party that the request is for: running requests are shared out among callers"),
    )
    pools: bool = field(
        default=False, metadata=told("the answer also gets the mean of the prompt's last hidden states (`mean_hidden`)")
    )

    def check(self) -> None:
        """Raises ConfigurationError for a value that no model and no tokenizer is needed to refuse."""
        if not isinstance(self.caller, str):
            raise ConfigurationError(f"caller is a text, got {type(self.caller).__name__}")
        true_or_false("fixed_length", self.fixed_length)
        true_or_false("pools", self.pools)


class RequestKeywords(TypedDict, total=False):
    """Gives the fields of `RequestOptions` to type checkers, as keyword arguments."""

    do_sample: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str]
    eos_token_id: int | Sequence[int] | None
    logits_processor: Sequence[LogitsHook]
    fixed_length: bool
    on_text: Callable[[str], None] | None
    caller: str
    pools: bool


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Holds the options of a store of adapters.

    Attributes:
        catalogue: the operator's list of adapters to fetch, or the path of its file.
        device_slots: the most LoRA adapters of one rank that can be on the device at a time, 1 to 64; and the most
            adapters of all other kinds together.
        host_bytes: the most bytes of adapters in host memory.
        dtype: the dtype of LoRA adapters in host memory: torch.bfloat16 ("bf16"), or torch.float32 ("fp32") to keep
            the files' numbers unrounded. Adapters of other kinds keep the dtypes of their files.
        bases: further names of this model's weights, which adapters may name as their base model.
        preload: the names of adapters to load now into host memory; the first ones are also put onto the device.
        cache: the folder of downloads; None means `adapters` in the client's cache.
        separate_calls: whether layers that share a call to the provider, such as q, k and v, get a call each, in
            every step. Adapters that change the inputs of such a layer (OFT, BOFT, HRA, some IA3) need this, and
            are refused otherwise: if only their steps had more calls, the provider would see which steps these are.
    """

    catalogue: str | Path | Catalogue | None = field(
        default=None,
        metadata=told(
            "file of adapters to fetch, each with its digest", "Adapters", shown="none", unit="FILE", kind=Path
        ),
    )
    device_slots: int = field(
        default=16,
        metadata=told("adapters of one rank on the device, 1 to 64; and of other kinds together", "Adapters", kind=int),
    )
    host_bytes: int = field(
        default=1 << 30,
        metadata=told("bytes of adapters in host memory", "Adapters", shown="1 GiB", unit="BYTES", kind=int),
    )
    dtype: torch.dtype | str = field(
        default="bf16",
        metadata=told(
            "dtype of LoRA adapters in host memory: bf16, or fp32 to round nothing",
            "Adapters",
            flag="--adapter-dtype",
            kind=str,
        ),
    )
    bases: Sequence[str] = field(
        default=(),
        metadata=told(
            "further name of the model's weights that adapters may name as their base; may be repeated",
            "Adapters",
            flag="--base-name",
            unit="NAME",
            kind=list[str],
        ),
    )
    preload: Sequence[str] = field(
        default=(),
        metadata=told(
            "adapter to load at the start; may be repeated, and the first ones are put onto the device",
            "Adapters",
            unit="NAME",
            kind=list[str],
        ),
    )
    cache: str | Path | None = field(
        default=None,
        metadata=told(
            "folder of fetched adapters",
            "Adapters",
            flag="--adapter-cache",
            shown="in the client's cache",
            unit="DIR",
            kind=Path,
        ),
    )
    separate_calls: bool = field(
        default=False,
        metadata=told(
            "give every layer a call of its own, for adapters that change inputs (OFT, BOFT, HRA, some IA3)",
            "Adapters",
            kind=bool,
        ),
    )

    @property
    def dtype_name(self) -> str | None:
        """Returns the name that torch has for `dtype`, such as "float32"; None if it is no dtype of a store."""
        return _DTYPES.get(str(self.dtype).removeprefix("torch."))

    def is_default(self, name: str) -> bool:
        """Returns whether an option has its default, in whatever form, such as [] for an empty tuple."""
        if name == "dtype":
            return self.dtype_name == StoreOptions().dtype_name
        value, default = getattr(self, name), getattr(StoreOptions(), name)
        return not len(value) if default == () else bool(value == default)

    def check(self) -> None:
        """Raises ConfigurationError for an impossible value; this opens nothing."""
        slots = self.device_slots
        if type(slots) is not int or not 1 <= slots <= MOST_PLACES:
            raise WrongOption(
                f"device_slots was expected to be 1 to {MOST_PLACES}, got {ascii(slots)[:40]}", "device_slots"
            )
        positive("host_bytes", self.host_bytes)
        if self.dtype_name is None:
            raise WrongOption(
                f"adapters are kept in torch.bfloat16 or torch.float32, not in {str(self.dtype)[:40]}", "dtype"
            )
        for name in ("bases", "preload"):
            given = getattr(self, name)
            names = given if isinstance(given, Collection) and not isinstance(given, str) else [None]
            if not all(isinstance(each, str) for each in names):
                raise WrongOption(f"{name} was expected to be a list of names, got {ascii(given)[:60]}", name)
        true_or_false("separate_calls", self.separate_calls)


class StoreKeywords(TypedDict, total=False):
    """Gives the fields of `StoreOptions` to type checkers, as keyword arguments."""

    catalogue: str | Path | Catalogue | None
    device_slots: int
    host_bytes: int
    dtype: torch.dtype | str
    bases: Sequence[str]
    preload: Sequence[str]
    cache: str | Path | None
    separate_calls: bool


NOT_OF_MANY = ("catalogue", "dtype", "preload", "cache")
"""The options of a store that `TenantClient.generate_many` does not take. It reads the folders that it is given, and
keeps the files' numbers unrounded."""


class ManyKeywords(RequestKeywords, EngineKeywords, total=False):
    """Gives the options of `TenantClient.generate_many` to type checkers, as keyword arguments."""

    device_slots: int
    host_bytes: int
    bases: Sequence[str]
    separate_calls: bool


def check_store_early(folder: object, given: Mapping[str, Any]) -> None:
    """Checks the options of a store of adapters before anything is loaded.

    Args:
        folder: the folder of adapters; None if there is none.
        given: those options of `StoreOptions` that the user gave.

    Raises:
        ConfigurationError: a value is impossible, or is not the default and has no effect since there are no adapters.
    """
    options = from_keywords(StoreOptions, given, "AdapterStore")
    options.check()
    changed = [each.name for each in fields(StoreOptions) if each.name in given and not options.is_default(each.name)]
    if folder is None and options.catalogue is None and changed:
        raise WrongOption(f"{changed[0]} has no effect without adapters: name their folder or a catalogue", changed[0])
    if isinstance(folder, str | Path) and (Path(folder) / CONFIG).is_file():
        raise ConfigurationError(
            f"{ascii(str(folder))[1:-1][:200]} is an adapter and no folder of adapters: name the folder that it lies in"
        )
    listed: Collection[str] = ()
    if isinstance(options.catalogue, str | Path):
        if not Path(options.catalogue).is_file():
            raise WrongOption(f"the catalogue of adapters, {options.catalogue}, is not a file", "catalogue")
        from tenant_sdk.serving.adapters.catalogue import read_catalogue

        listed = read_catalogue(Path(options.catalogue)).adapters
    elif options.catalogue is not None:
        listed = options.catalogue.adapters
    for name in options.preload:
        is_there = NAME.fullmatch(name) and isinstance(folder, str | Path) and (Path(folder) / name).is_dir()
        if not is_there and name not in listed:
            raise WrongOption(
                f"preload must name adapters of the folder or the catalogue, got {ascii(name)[:80]}", "preload"
            )
    if options.cache is not None:
        check_writable(Path(options.cache))
