"""This module makes PEFT's own modules for an adapter of the store, tests each of them before it is used, and runs them
around the calls of the model's layers. It also reads such an adapter into host memory (`pack_modules`).

A PEFT module calls its base layer in the middle of its own work, and the rows of many adapters have to reach the real
base layer in one call. So a module wraps a stub, which computes nothing, in place of the model's layer, and runs twice:
the first time (`base_inputs`) it stops at the call, and the stub keeps the rows that it got; the second time
(`outputs`) the stub returns the rows that the real base layer gave.

Guarantees:
- PEFT gets checked settings and the exact names of the layers, never a pattern by which the file selects layers. Memory
  is allocated only after the shapes that PEFT expects were found in the file. No compiler runs;
- global random numbers are not used, so that a seed that others set keeps its meaning;
- a module that mixes rows, gives numbers that are not finite, changes its own numbers, or does not call its base layer
  once with one row for each of its own, is refused before a request uses it, and so is an adapter that takes too long
  for one row;
- a module that calls its base layer never or more than once, or with rows of another number or content than the
  real base layer got, raises an error and gives no result;
- the numbers in host memory are those of the file, in the file's dtypes. They are not rounded to the dtype of the
  store, since a factor near 1, as IA3 has, would lose most of what was trained. Every number is finite.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.boft import layer as boft
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from runtime.loading import loading
from tenant_sdk.kinds.register import register
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.serving.adapters.lora import MODULES
from tenant_sdk.serving.adapters.reader import ModuleFile, OpenAdapter, Stamp
from wire.errors import ConfigurationError, InvalidTensor, VeilbaseError


class _Stopped(Exception):
    """Ends a module's first run at the call of its base layer. No code outside this module sees it."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows


class _Call(threading.local):
    """Holds the run of a module in the current thread: the rows that the real base layer got (None if they are not
    compared), the rows that it gave (None in the first run), how often the module has called its stub, and the rows of
    the latest such call."""

    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    num_calls = 0
    called: torch.Tensor | None = None


_CALL = _Call()


class _Stub:
    """Implements the call of a base layer that computes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ends a module's first run by `_Stopped`; returns the rows that the real base layer gave in the second.

        Raises:
            InvalidTensor: in the second run, `x` differs from the rows that the real base layer got.
        """
        _CALL.num_calls += 1
        _CALL.called = x
        if _CALL.outputs is None:
            raise _Stopped(x)
        if _CALL.inputs is not None and x is not _CALL.inputs and not same_rows(x, _CALL.inputs):
            raise InvalidTensor("a layer of an adapter called its base layer with other rows than announced")
        return _CALL.outputs


class StubLinear(_Stub, RemoteLinear):  # type: ignore[misc]
    """Replaces an nn.Linear below a PEFT module."""


class StubConv1D(_Stub, RemoteConv1D):
    """Replaces a Conv1D below a PEFT module."""


def stub_of(layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns a stub of a layer's type, with a copy of the layer's bias, which some PEFT modules subtract from the
    output that they get. On the meta device, the bias has no numbers.

    Args:
        layer: a Linear or Conv1D, local or remote.
        shape: (inputs, outputs) of the layer.
        dtype, device: dtype and device of its rows.
    """
    bias = getattr(layer, "bias", None)
    made = (StubConv1D if isinstance(layer, Conv1D) else StubLinear)(*shape, bias is not None, dtype).to(device)
    if bias is not None and made.bias is not None and device.type != "meta":
        made.bias.data.copy_(bias.detach())
    return made


def base_inputs(module: Callable[[torch.Tensor], Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows with which a PEFT module calls its base layer, shape (rows, inputs).

    Args:
        module: a module whose base layer is a stub.
        rows: the module's input, shape (rows, inputs).

    Raises:
        InvalidTensor: the module does not call its base layer.
    """
    with _call(None, None):
        try:
            module(rows)
        except _Stopped as exc:
            return exc.rows
    raise InvalidTensor("a layer of an adapter does not call its base layer")


def outputs(
    module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, given: torch.Tensor,
    inputs: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Returns a PEFT module's result, shape (rows, outputs).

    Args:
        module: a module whose base layer is a stub.
        rows: the module's input, shape (rows, inputs).
        given: the rows that the real base layer gave, shape (rows, outputs). They may be changed in place.
        inputs: the rows that the real base layer got; None if they are not compared.

    Raises:
        InvalidTensor: the module did not call its base layer once with these inputs.
    """
    with _call(inputs, given) as call:
        result = module(rows)
        if call.num_calls != 1 or result.shape != given.shape:
            raise InvalidTensor("a layer of an adapter does not call its base layer once")
    return result


def outputs_and_inputs(
    module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `outputs` returns, and the rows with which the module called its base layer, shape (rows, inputs).
    The caller has to compare these with the rows that the real base layer got.

    Raises:
        InvalidTensor: the module did not call its base layer once.
    """
    with _call(None, given) as call:
        result = module(rows)
        if call.num_calls != 1 or call.called is None or result.shape != given.shape:
            raise InvalidTensor("a layer of an adapter does not call its base layer once")
        return result, call.called


@contextlib.contextmanager
def _call(inputs: torch.Tensor | None, given: torch.Tensor | None) -> Iterator[_Call]:
    _CALL.inputs, _CALL.outputs, _CALL.num_calls, _CALL.called = inputs, given, 0, None
    try:
        yield _CALL
    finally:
        _CALL.inputs = _CALL.outputs = _CALL.called = None


def same_rows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, where NaN counts as the same as NaN."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


META = torch.device("meta")
_REMEMBERED = 16
"""The most settings whose shapes are remembered."""
_TRIAL_S = 30.0
"""The seconds that all modules of an adapter together may take for a row, before the adapter is refused. The slowest
known kind, FourierFT on the 210 layers of SmolLM2-135M, takes one second."""


@dataclass(frozen=True)
class Layer:
    """Describes a layer of the model: a module of its type, and the numbers of its inputs and outputs."""

    like: nn.Module
    shape: tuple[int, int]


@dataclass(frozen=True)
class _Expected:
    """Holds what PEFT expects of an adapter's settings: the shapes of its tensors, and the bytes of its modules."""

    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int


class ShapeChecks:
    """Compares the tensors of files with those that PEFT expects, without allocating memory for them.

    PEFT has to make the modules of all layers for this, which takes about as long as making them for use. So the
    expected shapes are remembered for the latest 16 settings, which adapters of one origin often share.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        """Makes checks for adapters of a model with these layers, by name. Only one thread may use them."""
        self._layers = layers
        self._known: OrderedDict[str, _Expected] = OrderedDict()

    def check(self, name: str, contents: ModuleFile, max_bytes: int) -> None:
        """Compares the tensors of a file with those that PEFT expects.

        Args:
            name: the adapter's name, for error messages.
            contents: the file's settings and tensors.
            max_bytes: the most bytes that the modules may take.

        Raises:
            ConfigurationError: the tensors differ in a name or shape, the modules take too much memory, or PEFT refuses
                the settings.
        """
        expected = self._expected(name, contents, max_bytes)
        found = {key: each.shape for key, each in contents.named.items()}
        for key in sorted(expected.shapes.keys() | found.keys()):
            if expected.shapes.get(key) != found.get(key):
                raise ConfigurationError(
                    f"the adapter {name} ({contents.settings.kind.title}) is for another base or of other settings: "
                    f"{ascii(key)[:100]} was expected with the shape {expected.shapes.get(key)}, and has "
                    f"{found.get(key)}"
                )
        _check_bytes(name, contents, expected.num_bytes, max_bytes)

    def _expected(self, name: str, contents: ModuleFile, max_bytes: int) -> _Expected:
        settings = contents.settings
        scaled = [module for module in contents.modules if settings.scales_input(module)]
        key = repr((settings.peft_type, sorted(settings.options.items()), contents.modules, scaled))
        if key not in self._known:
            self._known[key] = _ask_peft(name, contents, self._layers, max_bytes)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _ask_peft(name: str, contents: ModuleFile, layers: Mapping[str, Layer], max_bytes: int) -> _Expected:
    device = META
    if not contents.settings.kind.shapes_on_meta:
        _check_bytes(name, contents, _estimated_bytes(contents, layers), max_bytes)
        device = torch.device("cpu")
    made = _injected(name, contents, layers, torch.float32, device)
    everything = (*made.parameters(), *made.buffers())
    return _Expected(
        {key: tuple(each.shape) for key, each in _state(made).items()},
        sum(each.numel() * each.itemsize for each in everything),
    )


def make_modules(
    packed: PackedModules, layers: Mapping[str, Layer], dtype: torch.dtype, device: torch.device
) -> dict[str, nn.Module]:
    """Returns PEFT's module for each layer that an adapter changes.

    Args:
        packed: the adapter, whose shapes were checked.
        layers: the model's layers by name.
        dtype, device: dtype and device of the model's rows.

    Raises:
        ConfigurationError: PEFT cannot make a module, or a module is refused.
    """
    made = _injected(packed.name, packed.contents, layers, dtype, device)
    with _no_random_numbers():  # AdaLoRA makes its factors anew if some ranks are left out.
        set_peft_model_state_dict(made, {key: each.to(device) for key, each in packed.values.items()})
    taken = _state(made)
    for key, value in packed.values.items():
        if not torch.equal(taken[key].to(value.dtype), value.to(device)):
            raise ConfigurationError(f"the adapter {packed.name} holds {ascii(key)[:100]}, which PEFT does not take")
    made.eval().requires_grad_(False)
    modules = {module: made.base_model.model.get_submodule(module) for module in packed.contents.modules}
    began = time.monotonic()
    for module, each in modules.items():
        if time.monotonic() - began > _TRIAL_S:
            raise ConfigurationError(f"the adapter {packed.name} takes more than {_TRIAL_S:.0f} s for one row")
        _try(packed, module, each, layers[module].shape, dtype, device)
    return modules


def _state(made: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(made, save_embedding_layers=False)
    return state


def _check_bytes(name: str, contents: ModuleFile, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ConfigurationError(
            f"the adapter {name} ({contents.settings.kind.title}) takes {num_bytes / 1e6:.1f} MB as modules: "
            f"at most {max_bytes / 1e6:.1f} MB fit"
        )


def _estimated_bytes(contents: ModuleFile, layers: Mapping[str, Layer]) -> int:
    """Returns an estimate, in bytes and never too small, of the memory that an adapter's modules take. It is for kinds
    whose shapes can be learnt only by making the modules.

    BOFT keeps permutations and rotations of all inputs for each factor; AdaLoRA keeps two factors and a diagonal;
    TinyLoRA keeps two factors and `u` square matrices.
    """
    options, shapes = contents.settings.options, [layers[module].shape for module in contents.modules]
    if contents.settings.peft_type == "BOFT":
        factors = 1 + int(options.get("boft_n_butterfly_factor", 1))
        return sum(2 * 4 * factors * inputs**2 for inputs, _ in shapes)
    if contents.settings.peft_type == "TINYLORA":
        rank, matrices = int(options.get("r", 2)), int(options.get("u", 64))
        return sum(4 * (rank * sum(shape) + matrices * rank**2) for shape in shapes)
    return sum(4 * int(options.get("init_r", 12)) * (1 + sum(shape)) for shape in shapes)


def _injected(
    name: str, contents: ModuleFile, layers: Mapping[str, Layer], dtype: torch.dtype, device: torch.device
) -> Any:  # fmt: skip
    """Returns a PEFT model of stubs, into whose adapter the numbers of the file have not been loaded yet.

    Raises:
        ConfigurationError: PEFT refuses the settings, or has no such kind.
    """
    settings = contents.settings
    try:
        with loading(), no_compiler(), _no_random_numbers(), META if device == META else torch.device("cpu"):
            register()
            return PeftModel(_skeleton(contents, layers, dtype, device), config_of(contents, layers))
    except VeilbaseError:
        raise
    except Exception as exc:  # noqa: BLE001 - PEFT raises many types; their texts may quote the file
        raise ConfigurationError(
            f"the adapter {name} ({settings.kind.title}) has settings that PEFT refuses ({type(exc).__name__})"
        ) from None


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Keeps PEFT from compiling BOFT's CUDA code, which it tries for every layer; BOFT then computes with torch.

    Callers must be inside `loading`.
    """
    before, boft._FBD_CUDA = boft._FBD_CUDA, False
    try:
        yield
    finally:
        boft._FBD_CUDA = before


def config_of(contents: ModuleFile, layers: Mapping[str, Layer]) -> PeftConfig:
    """Returns PEFT's config of an adapter, made of its checked settings and of the exact names of its layers."""
    return PEFT_TYPE_TO_CONFIG_MAPPING[contents.settings.peft_type](**_options(contents, layers))


def _options(contents: ModuleFile, layers: Mapping[str, Layer]) -> dict[str, Any]:
    settings, modules = contents.settings, contents.modules
    made: dict[str, Any] = {**settings.options, **settings.kind.always, "inference_mode": True}
    made["target_modules"] = list(modules)
    if "fan_in_fan_out" in settings.kind.settings:  # PEFT corrects a wrong value, with a warning.
        made["fan_in_fan_out"] = isinstance(layers[modules[0]].like, Conv1D)
    if settings.peft_type == "IA3":
        made["feedforward_modules"] = [each for each in modules if settings.scales_input(each)]
    return made


def _skeleton(
    contents: ModuleFile, layers: Mapping[str, Layer], dtype: torch.dtype, device: torch.device
) -> nn.Module:  # fmt: skip
    """Returns a module that has a stub under the name of each layer that the adapter changes. It also has one
    parameter, from which PEFT learns the device."""
    root = nn.Module()
    root.register_parameter("device_of_rows", nn.Parameter(torch.zeros(1, device=device), requires_grad=False))
    for module in contents.modules:
        *path, last = module.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, stub_of(layers[module].like, layers[module].shape, dtype, device))
    return root


def _try(
    packed: PackedModules, module: str, made: nn.Module, shape: tuple[int, int], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Runs a module on two rows, of which the second is NaN, and refuses the module unless the first row's result is
    finite. A finite result shows that a row's result does not depend on the other rows.

    Raises:
        ConfigurationError: the module cannot be used; one reason is that it does not call its base layer once.
    """
    rows = torch.full((2, shape[0]), math.nan, dtype=dtype, device=device)
    given = torch.full((2, shape[1]), math.nan, dtype=dtype, device=device)
    rows[0] = torch.linspace(-1, 1, shape[0])
    given[0] = torch.linspace(-1, 1, shape[1])
    changes = packed.contents.settings.changes_input(module)
    reason = "mixes rows or gives numbers that are not finite"
    try:
        if not isinstance(made, BaseTunerLayer):
            raise ConfigurationError(f"the adapter {packed.name} has no layer of PEFT for {module}")
        with torch.no_grad():
            inputs = base_inputs(made, rows)
            _end_projection(made)
            versions = _versions(made)
            result = outputs(made, rows, given, None)
        if versions != _versions(made):
            reason = "changes its own numbers"
        elif not changes and not torch.equal(inputs[0], rows[0]):
            reason = "changes its input, which its kind does not"
        elif inputs.shape == rows.shape and bool(torch.isfinite(inputs[0]).all() and torch.isfinite(result[0]).all()):
            return
    except ConfigurationError:
        raise
    except Exception as exc:  # noqa: BLE001 - as above
        raise ConfigurationError(
            f"the adapter {packed.name} cannot be computed in {module} ({type(exc).__name__})"
        ) from None
    raise ConfigurationError(f"the adapter {packed.name} {reason}, in {module}")


def _versions(module: nn.Module) -> list[int]:
    """Returns how often each of a module's tensors was changed in place."""
    return [tensor._version for tensor in (*module.parameters(), *module.buffers())]


def _end_projection(made: nn.Module) -> None:
    """Makes OFT keep the numbers of its first run. With `coft`, PEFT moves them within a bound in every run, in place.
    After the first run this changes them by rounding only, but then two runs for the same rows differ."""
    for each in made.modules():
        if getattr(each, "coft", False):
            each.coft = False  # type: ignore[assignment]


class _NoRandomNumbers(TorchDispatchMode):
    """Replaces torch's random numbers by zeros, unless an operation got a generator as an argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        has_generator = any(isinstance(each, torch.Generator) for each in (*args, *options.values()))
        if torch.Tag.nondeterministic_seeded not in func.tags or has_generator:
            return func(*args, **options)
        if func.__name__.split(".")[0].endswith("_"):  # such as normal_
            return args[0].zero_()
        device = options.get("device")
        like = func(*map(_on_meta, args), **(options if device is None else {**options, "device": META}))
        return torch.zeros(like.shape, dtype=like.dtype, device=device)


def _no_random_numbers() -> TorchDispatchMode:
    return _NoRandomNumbers()  # type: ignore[no-untyped-call]


def _on_meta(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class PackedModules:
    """Holds one adapter's numbers in host memory.

    Attributes:
        digest: the SHA-256 of the adapter's files, in hex.
        name: the adapter's name when it was read, for error messages.
        stamp: sizes and times of its files (see files.py); None if they cannot be relied on.
        contents: the adapter's settings, layers and shapes.
        values: the tensors by the names that PEFT gives them, all views of one tensor.
        num_bytes: the bytes that the tensors take.
    """

    digest: str
    name: str
    stamp: Stamp | None
    contents: ModuleFile
    values: Mapping[str, torch.Tensor] = field(repr=False)
    num_bytes: int

    @property
    def rank(self) -> int:
        """Returns `MODULES`, which stands for the rank of the places of adapters that are kept as modules."""
        return MODULES


def pack_modules(opened: OpenAdapter, contents: ModuleFile) -> PackedModules:
    """Reads an adapter's weights into one block of memory.

    Args:
        opened: the adapter.
        contents: what its files contain, as `OpenAdapter.check` found.

    Raises:
        ConfigurationError: a number is NaN or infinite, or the files changed in the meantime.
    """
    num_bytes = sum(each.num_bytes for each in contents.tensors)
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    by_begin: dict[int, torch.Tensor] = {}
    end = 0
    for stored in sorted(contents.tensors, key=lambda each: -each.dtype.itemsize):  # Then all are aligned.
        begin, end = end, end + stored.num_bytes
        by_begin[stored.begin] = memory[begin:end].view(stored.dtype).view(stored.shape)
    for stored, numbers in opened.tensors():
        if not bool(torch.isfinite(numbers).all()):
            raise ConfigurationError(f"the adapter {opened.name} holds NaN or infinite numbers")
        by_begin[stored.begin].copy_(numbers)
    values = {key: by_begin[stored.begin] for key, stored in contents.named.items()}
    return PackedModules(opened.digest(), opened.name, opened.settled_stamp, contents, values, num_bytes)
