"""This module reads the checkpoint that a tenant trusts, and compares a provider's manifest and bundle with it.

Guarantees: only the tenant can name the checkpoint; the provider cannot. No code from the checkpoint runs
(`trust_remote_code` stays off), and no pickle is opened. After `check_provider` the manifest and the bundle agree with
the checkpoint, and the verifier's projections, with which it checks replies, were computed from the checkpoint's
weights. The built-in name stands for the file with the known SHA-256 and for no other (wire/built_in.py): what is
loaded is what was hashed. Tensors are read one at a time from safetensors. If the checkpoint is a GGUF file, or if only
transformers' own loader can find its tensors, the whole model is in memory during the comparison. Not guaranteed: that
the checkpoint is a good model. If others can change a model on a hub, pin it with `@revision`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key

from noise.verify import Verifier
from tenant_sdk.plan import HUB_ID, not_cached
from tenant_sdk.text.source import LocalSource
from tenant_sdk.trust.compare import (
    check_files,
    check_group,
    check_norm_names,
    check_scale_names,
    check_tensors,
    same_bits,
    write_files,
)
from wire.built_in import BUILT_IN
from wire.errors import ConfigurationError, VeilbaseError, VerificationFailed
from wire.loading import loading, quiet_transformers
from wire.manifest import Manifest

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""The names of tokenizer files: a folder counts as a tokenizer if it has at least one of them."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LOGGER = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""A function that shows progress: it takes the number of groups that were compared, and the number of all groups."""


@dataclass(frozen=True)
class _Weights:
    """Reads a model's tensors in the dtype in which an honest provider loads them.

    Attributes:
        model: the model; its tensors have no storage if `streamed`.
        read: a function that takes a state-dict name and returns the tensor of this name.
        streamed: whether `read` reads from disk; otherwise all tensors are in memory.
    """

    model: Any
    read: Callable[[str], torch.Tensor] = field(repr=False)
    streamed: bool


class TrustedCheckpoint:
    """Reads a checkpoint that the tenant trusts; tensors are loaded only when a method needs them. The class is not
    thread-safe."""

    def __init__(self, source: LocalSource) -> None:
        """Keeps the location of the checkpoint, which `open` finds."""
        self.name = source.name
        self._source = source
        self._loaded: _Weights | None = None

    @classmethod
    def open(cls, name: str | Path) -> TrustedCheckpoint:
        """Finds a checkpoint by name, and downloads it from the hub if needed.

        Args:
            name: a Hugging Face folder with safetensors, a GGUF file, `smollm2-135m`, or a hub id, which may end in
                `@revision`. A hub id is downloaded unless it is cached or HF_HUB_OFFLINE is set.

        Raises:
            ConfigurationError: there is no such checkpoint, it lacks config.json or safetensors, it keeps its weights
                in pickles, or the file of a built-in model is not the known one.
        """
        return cls(_find(str(name)))

    @property
    def streamed(self) -> bool:
        """Returns whether tensors are read one at a time; otherwise the whole model is in memory until `release`."""
        return self._weights().streamed

    def layer(self, name: str, kind: Literal["linear", "conv1d"]) -> torch.Tensor:
        """Returns the weight of one layer in the form that the quantiser takes (wire/ring/quantise.py).

        Args:
            name: the module's full name, as in the manifest.
            kind: how the weight is stored: `linear` as (out, in), `conv1d` as (in, out).

        Returns:
            float32, shape (in_features, out_features), CPU; not contiguous for `linear`.

        Raises:
            VerificationFailed: the checkpoint has no such layer.
        """
        try:
            weight = self._weights().read(f"{name}.weight")
        except KeyError as exc:
            raise VerificationFailed(f"the trusted checkpoint has no layer {name}") from exc
        weight = weight.detach().to(torch.float32)
        return weight.t() if kind == "linear" and weight.dim() == 2 else weight

    def check_provider(
        self,
        manifest: Manifest,
        bundle_folder: Path,
        verifier: Verifier,
        progress: Progress | None = None,
        keep: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Compares a provider's manifest and bundle with this checkpoint, and adds each group's weight to the verifier.

        Args:
            manifest: the provider's manifest.
            bundle_folder: the folder that `fetch_bundle` returned.
            verifier: the verifier that gets every group; it is closed if any part differs.
            progress: a function that is called after each group, see `Progress`.
            keep: a function that takes each group's number and W̃, the int8 weight, if the tenant needs the weights
                itself (mask='pad').

        Raises:
            VerificationFailed: a part differs from the checkpoint; the text names the part.
            ConfigurationError: the checkpoint cannot be read.
        """
        try:
            weights = self._weights()
            with tempfile.TemporaryDirectory(prefix="trusted-") as scratch, quiet_transformers():
                write_files(weights.model, self._tokenizer(), Path(scratch))
                check_files(Path(scratch), bundle_folder, manifest)
            check_tensors(bundle_folder, weights.model, weights.read, manifest)
            scales, norms = check_scale_names(bundle_folder, manifest), check_norm_names(bundle_folder, manifest)
            for done, group in enumerate(manifest.groups, start=1):
                quantised = check_group(group, self.layer, weights.model, scales, norms)
                verifier.add_group(group.id, quantised)
                if keep is not None:
                    keep(group.id, quantised)
                if progress is not None:
                    progress(done, len(manifest.groups))
        except BaseException:
            verifier.close()
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Frees the tensors in memory; a later method loads them again if needed."""
        self._loaded = None

    def _weights(self) -> _Weights:
        if self._loaded is None:
            with loading():
                try:
                    self._loaded = self._load()
                except VeilbaseError:
                    raise
                except Exception as exc:  # a damaged file or config may make transformers raise any exception
                    raise ConfigurationError(
                        f"cannot read the trusted checkpoint {self.name!r} ({type(exc).__name__})"
                    ) from exc
        return self._loaded

    def _load(self) -> _Weights:
        if self._source.gguf_file is None:
            streamed = _stream(self._source.folder)
            if streamed is not None:
                return streamed
            _LOGGER.warning(
                "the tensors of %s need transformers' own loader: the model is held in memory while it is compared",
                self.name,
            )
        return _hold(self._source)

    def _tokenizer(self) -> Any | None:
        options = {} if self._source.gguf_file is None else {"gguf_file": self._source.gguf_file}
        with self._source.opened() as folder:
            try:
                with loading(), _reading_gguf() if options else contextlib.nullcontext():
                    return AutoTokenizer.from_pretrained(
                        folder, local_files_only=True, trust_remote_code=False, **options
                    )
            except Exception:  # noqa: BLE001 - as at the provider, an unusable tokenizer counts as none
                return None


def _find(name: str) -> LocalSource:
    if name in BUILT_IN:
        return _built_in(name)
    path = Path(name or "?").expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return LocalSource(path.stem, path.resolve().parent, path.name)
    if path.is_dir():
        return LocalSource(path.resolve().name, _checked_folder(path.resolve(), name))
    if HUB_ID.fullmatch(name) is None or path.exists():
        raise ConfigurationError(
            f"cannot find the checkpoint {name[:200]!r}: expected {', '.join(BUILT_IN)}, a GGUF file, "
            "a Hugging Face folder, or a hub id"
        )
    return LocalSource(name, _checked_folder(_from_hub(name), name))


def find_tokenizer(name: str | Path) -> LocalSource:
    """Finds a tokenizer that the tenant trusts, by the same rules as `TrustedCheckpoint.open`, but without weights.

    Args:
        name: a folder with tokenizer files, a GGUF file, `smollm2-135m`, or a hub id, which may end in `@revision`.

    Raises:
        ConfigurationError: there is no such tokenizer, or the file of a built-in model is not the known one.
    """
    given = str(name)
    path = Path(given or "?").expanduser()
    if given in BUILT_IN:
        return _built_in(given)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return LocalSource(given, path.resolve().parent, path.name)
    if not path.is_dir() and (HUB_ID.fullmatch(given) is None or path.exists()):
        raise ConfigurationError(
            f"cannot find the tokenizer {given[:200]!r}: expected {', '.join(BUILT_IN)}, a GGUF file, a folder with "
            "tokenizer files, or a hub id"
        )
    folder = path.resolve() if path.is_dir() else _from_hub(given, _TOKENIZER_FILES, "tokenizer")
    if not any((folder / file).is_file() for file in _TOKENIZER_MARKS):
        raise ConfigurationError(f"expected a folder with tokenizer files, got {given[:200]!r}")
    return LocalSource(given, folder)


def _built_in(name: str) -> LocalSource:
    known = BUILT_IN[name]
    file = known.find()
    known.check(file)  # so that another file is refused at once; what is loaded later is checked again, as it is copied
    return LocalSource(name, file.parent, file.name, known)


def _from_hub(name: str, patterns: Sequence[str] = _HUB_FILES, what: str = "checkpoint") -> Path:
    """Returns the folder of the cached or downloaded snapshot of `owner/model[@revision]`. Only files that match
    `patterns` are downloaded; these exclude pickles and code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import IncompleteSnapshotError

    repo_id, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            repo_id, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except IncompleteSnapshotError as exc:  # this machine is offline, and the cache has only some of the files
        found = str(exc.snapshot_path)
    except (OSError, ValueError) as exc:
        if is_offline_mode():
            raise ConfigurationError(not_cached(what, name)) from exc
        raise ConfigurationError(
            f"the {what} {name[:200]!r} is neither a path nor cached here nor to be had from the hub "
            f"({type(exc).__name__})"
        ) from exc
    return Path(str(found))


def _checked_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"expected a Hugging Face folder with a config.json, got {name[:200]!r}")
    if not _weight_files(folder):
        if any(path for pattern in _PICKLES for path in folder.glob(pattern)):
            raise ConfigurationError(f"{name[:200]!r} keeps its weights in pickles, which are not opened: convert it")
        raise ConfigurationError(f"{name[:200]!r} holds no model.safetensors")
    return folder


def _weight_files(folder: Path) -> list[Path]:
    """Returns the paths of the safetensors files that transformers would read, sorted by name."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [folder / Path(name).name for name in sorted(names)]
    except (ValueError, KeyError, AttributeError, TypeError) as exc:
        raise ConfigurationError(f"{index.name} of the trusted checkpoint cannot be read") from exc


def _stream(folder: Path) -> _Weights | None:
    """Returns weights that are read from safetensors one by one, or None if only transformers' own loader can find the
    tensors or their dtypes."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    dtype = config.dtype
    if not isinstance(dtype, torch.dtype) or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if model._get_dtype_plan(dtype):  # some modules would be loaded in another dtype
        return None
    model.generation_config = _generation_config(folder)
    state = model.state_dict(keep_vars=True)
    places = _places(folder, model, state)
    if places is None:
        return None

    def read(name: str) -> torch.Tensor:
        file, key = places[name]
        return _read(file, key).to(state[name].dtype)

    return _Weights(model, read, streamed=True)


def _generation_config(folder: Path) -> Any:
    """Returns the generation settings, as `from_pretrained` finds them: from generation_config.json or config.json."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True, local_files_only=True
        )


def _places(folder: Path, model: Any, state: dict[str, Any]) -> dict[str, tuple[Path, str]] | None:
    """Returns (file, key in the file) of every tensor of the model, by name, tied names included; returns None if the
    names alone do not determine where the tensors are."""
    places: dict[str, tuple[Path, str]] = {}
    transforms = get_model_conversion_mapping(model)
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if any(transform.rename_source_key(key)[1] is not None for transform in transforms):
                    return None
                name, _ = rename_source_key(key, [], [], model.base_model_prefix, state)
                if name in places or (name in state and opened.get_slice(key).get_shape() != list(state[name].shape)):
                    return None
                if name in state:
                    places[name] = file, key
    return places if _share_tied(places, state) else None


def _share_tied(places: dict[str, tuple[Path, str]], state: dict[str, Any]) -> bool:
    """Gives all names of a tied tensor the same file and key.

    Returns:
        False if a tensor is in no file, or if two names of a tied tensor have different contents in the files.
    """
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        found = [places[name] for name in names if name in places]
        if not found or not all(same_bits(_read(*found[0]), _read(*other)) for other in found[1:]):
            return False
        places.update(dict.fromkeys(names, found[0]))
    return True


def _read(file: Path, key: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as exc:
        raise ConfigurationError(f"the trusted checkpoint's {file.name} can no longer be read") from exc
    return tensor


def _hold(source: LocalSource) -> _Weights:
    """Loads the whole model into memory, with the options of provider/model/load.py, and returns its weights."""
    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True}
    if source.gguf_file is not None:
        options = {"dtype": torch.float32, "gguf_file": source.gguf_file}
    with source.opened() as folder, _reading_gguf() if source.gguf_file else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    state = model.state_dict()
    return _Weights(model, state.__getitem__, streamed=False)


@contextlib.contextmanager
def _reading_gguf() -> Iterator[None]:
    """Makes transformers parse a GGUF file once instead of three times, which halves the time, and hides the progress
    bar.

    transformers has no option for either, so functions are replaced inside the context; see provider/model/load.py.
    """
    import gguf
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    originals = gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__
    gguf.GGUFReader, gguf.get_tensor_name_map = (functools.cache(original) for original in originals[:2])
    tqdm.__init__ = functools.partialmethod(originals[2], disable=True)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__ = originals
