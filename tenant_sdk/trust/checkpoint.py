"""This module reads the checkpoint that a tenant trusts, and compares a provider's manifest and bundle with it.

Guarantees: only the tenant can name the checkpoint; the provider cannot. No code from the checkpoint runs
(`trust_remote_code` stays off), and no pickle is opened. After `check_provider` the manifest and the bundle agree with
the checkpoint, and the verifier's projections, with which it checks replies, were computed from the checkpoint's
weights. The built-in name stands for the file with the known SHA-256 and for no other (wire/built_in.py): what is
loaded is what was hashed. If a cache folder is given, the int8 weights are kept there in a prepared store
(wire/prepared.py), which is made from the checkpoint alone: later sessions check the SHA-256 of the checkpoint's files
and of the store, and read no tensor of the checkpoint. Otherwise tensors are read one at a time from safetensors. If
the checkpoint is a GGUF file, or if only transformers' own loader can find its tensors, the whole model is in memory
while it is read. Not guaranteed: that the checkpoint is a good model. If others can change a model on a hub, pin it
with `@revision`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key
from transformers.pytorch_utils import Conv1D

from noise.verify import Verifier
from runtime.loading import loading, quiet_transformers
from tenant_sdk.plan import HUB_ID, not_cached
from tenant_sdk.report import Report, megabytes, unseen
from tenant_sdk.text.source import LocalSource
from tenant_sdk.trust.compare import (
    StateNames,
    check_files,
    check_group,
    check_norm_names,
    check_scale_names,
    check_tensors,
    differs,
    join,
    same_bits,
    tensor_digest,
    write_files,
)
from tenant_sdk.trust.local_files import (
    PICKLES,
    check_tokenizer_folder,
    checked_folder,
    has_tokenizer_files,
    no_such,
    weight_files,
)
from wire.built_in import BUILT_IN
from wire.errors import ConfigurationError, InvalidTensor, VeilbaseError, VerificationFailed
from wire.manifest import GroupInfo, LayerInfo, Manifest
from wire.model_files import existing, is_gguf_name, not_from_hub
from wire.prepared import LayerKind, PreparedLayer, PreparedStore, StoreKey, open_store, prepare_layer, writing
from wire.ring.quantise import digest

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_UNREAD = (".*", "*.md", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "*.tflite", "*.png", "*.jpg", "*.pdf")
"""Files in a checkpoint's folder that nothing reads here: other formats of the weights, descriptions and pictures."""
_READERS = (
    "veilbase", "transformers", "tokenizers", "safetensors", "gguf", "torch", "numpy", "sentencepiece", "tiktoken",
    "protobuf",
)  # fmt: skip
"""The distributions that decide what is read from a checkpoint: each set of versions has a store of its own."""
_READ_BYTES = 1 << 20
_LOGGER = logging.getLogger(__name__)
_Item = TypeVar("_Item")

_SUMMING, _METADATA = "reading the trusted checkpoint", "reading its metadata"
_LOADING, _TOKENIZER = "loading its tensors", "loading its tokenizer"
_PREPARING, _CHECKING, _COMPARING = "preparing its weights", "reading the prepared weights", "comparing the provider"
_KEEPING = "reading the weights of kept layers"
"""The stages of a comparison, as they are shown. The first one reads all files, for their SHA-256."""


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
        self._report: Report = unseen
        self._loaded: _Weights | None = None
        self._lacks_tokenizer = False
        """Whether there are a tokenizer's files that could not be loaded."""

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
        report: Report = unseen,
        keep: Callable[[int, torch.Tensor], None] | None = None,
        cache: Path | None = None,
        unasked: Collection[int] = (),
    ) -> GroupWeights | None:
        """Compares a provider's manifest and bundle with this checkpoint, and adds each group's weight to the verifier.

        Args:
            manifest: the provider's manifest.
            bundle_folder: the folder that `fetch_bundle` returned.
            verifier: the verifier that gets every group but those of `unasked`; it is closed if any part differs.
            report: told how far each stage is.
            keep: a function that takes each group's number and W̃, the int8 weight, which may be a view of the store's
                file, if the tenant needs weights itself (mask='pad', and layers that it keeps).
            cache: the cache folder, in which the int8 weights are kept for later sessions (wire/prepared.py); None to
                keep nothing. What is kept depends on this checkpoint alone, and on nothing that the provider sent.
            unasked: the groups that the provider will not be asked for; the verifier does not get them.

        Returns:
            The int8 weights of the provider's groups, if they are kept; otherwise None.

        Raises:
            VerificationFailed: a part differs from the checkpoint; the text names the part.
            ConfigurationError: the checkpoint cannot be read.
        """
        self._report = report
        try:
            trusted = _Live(self) if cache is None else self._prepared(cache / "prepared")
            with tempfile.TemporaryDirectory(prefix="trusted-") as scratch:
                for name, content in trusted.files().items():
                    (Path(scratch) / name).write_bytes(content)
                check_files(Path(scratch), bundle_folder, manifest)
            state = trusted.state()
            check_tensors(bundle_folder, state, trusted.digest_of, manifest)
            scales, norms = check_scale_names(bundle_folder, manifest), check_norm_names(bundle_folder, manifest)
            for group in _counted(report, _COMPARING, manifest.groups, "groups"):
                quantised = check_group(group, trusted.layer, state, scales, norms)
                if group.id not in unasked:
                    verifier.add_group(group.id, quantised)
                if keep is not None:
                    keep(group.id, quantised)
            return GroupWeights(trusted, manifest) if isinstance(trusted, _Stored) else None
        except BaseException:
            verifier.close()
            raise
        finally:
            self.release()
            self._report = unseen

    def own_weights(self, groups: Sequence[GroupInfo], report: Report = unseen) -> dict[int, torch.Tensor]:
        """Returns the checkpoint's own weights of a provider's groups in bf16, after `check_provider`. A weight of
        another type is rounded to bf16.

        Args:
            groups: the groups, as the manifest describes them.
            report: told how far this is.

        Returns:
            By group's number W, bf16, shape (in_features, out_features), CPU, contiguous.

        Raises:
            ConfigurationError: the checkpoint was changed since the comparison, or can no longer be read.
        """
        self._report = report
        try:
            return {
                group.id: torch.cat([self._own_weight(each) for each in group.layers], dim=1)
                for group in _counted(report, _KEEPING, groups, "groups")
            }
        finally:
            self.release()
            self._report = unseen

    def _own_weight(self, info: LayerInfo) -> torch.Tensor:
        weight = self.layer(info.name, info.kind)
        if prepare_layer(weight, info.kind).digest != info.digest:  # What is used is what was compared.
            raise ConfigurationError(f"the trusted checkpoint {self.name!r} was changed while in use: start again")
        return weight.to(torch.bfloat16).contiguous()

    def _prepared(self, folder: Path) -> _Live | _Stored:
        """Returns the checkpoint's contents from the prepared store, which is made if there is none that can be
        trusted. If none can be kept, the contents are read from the checkpoint itself."""
        key, store = self._key(), None
        try:
            store = open_store(folder, key, self._checked)
        except ConfigurationError as exc:
            _LOGGER.warning("the prepared weights of %s in %s are made anew: %s", self.name, folder, exc)
        if store is None:
            try:
                self._write_store(folder, key)
                store = _just_written(folder, key, self._checked)
            except _NotKept as exc:
                _LOGGER.warning("the prepared weights of %s are not kept in %s: %s", self.name, folder, exc)
                return _Live(self)
        return _Stored(self, store)

    def _checked(self, done: int, total: int) -> None:
        self._report(_CHECKING, megabytes(done), megabytes(total), "MB")

    def _write_store(self, folder: Path, key: StoreKey) -> None:
        """Writes the prepared store. Nothing in it depends on a provider."""
        live, model = _Live(self), self._weights().model
        names = _layers(model)
        with _not_kept(), writing(folder, key) as writer:
            for name, content in live.files().items():
                writer.add_blob(name, content)
            if self._lacks_tokenizer:  # A failure may pass, and what is stored now would be believed later.
                raise _NotKept("its tokenizer cannot be loaded here")
            state = live.state()
            writer.facts = {
                "names": state.names,
                "places": state.places,
                "tied": sorted(state.tied),
                "digests": {name: live.digest_of(name) for name in state.bundled(())},
            }
            for name, kind in _counted(self._report, _PREPARING, names.items(), "layers"):
                with contextlib.suppress(InvalidTensor):  # a weight that is not finite; refused if a provider serves it
                    writer.add_layer(name, live.layer(name, kind))
            if self._key() != key:
                raise ConfigurationError(f"the trusted checkpoint {self.name!r} was changed while it was read")

    def _key(self) -> StoreKey:
        """Returns the SHA-256 of every file of the checkpoint that can decide what is read, and the versions of what
        reads them."""
        versions = {name: _version(name) for name in _READERS}
        folder, file = self._source.folder, self._source.gguf_file
        if self._source.known is not None and file is not None:
            read = _reading(self._report, [folder / file])
            self._source.known.check(folder / file, read=read)
            return StoreKey({"gguf": self._source.known.sha256}, versions)
        paths = {"gguf": folder / file} if file is not None else {
            str(path.relative_to(folder)): path for path in _source_files(folder)
        }  # fmt: skip
        read = _reading(self._report, paths.values())
        return StoreKey({name: _sha256(path, read) for name, path in sorted(paths.items())}, versions)

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
        return _hold(self._source, self._report)

    def _tokenizer(self) -> Any | None:
        self._report(_TOKENIZER)
        options = {} if self._source.gguf_file is None else {"gguf_file": self._source.gguf_file}
        with self._source.opened() as folder:
            try:
                with loading(), _reading_gguf() if options else contextlib.nullcontext():
                    return AutoTokenizer.from_pretrained(
                        folder, local_files_only=True, trust_remote_code=False, **options
                    )
            except Exception:  # noqa: BLE001 - as at the provider, an unusable tokenizer counts as none
                self._lacks_tokenizer = bool(options) or has_tokenizer_files(Path(folder))
                return None


def _counted(report: Report, stage: str, items: Collection[_Item], unit: str) -> Iterator[_Item]:
    """Yields items, and reports how many were dealt with: when the first one is taken, and after each."""
    report(stage, 0, len(items), unit)
    for done, item in enumerate(items, 1):
        yield item
        report(stage, done, len(items), unit)


class _Live:
    """Gives the contents of a checkpoint by reading and quantising them."""

    def __init__(self, checkpoint: TrustedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def files(self) -> dict[str, bytes]:
        """Returns the files that an honest provider's bundle has, apart from tensors, by name."""
        with tempfile.TemporaryDirectory(prefix="trusted-") as scratch, quiet_transformers():
            write_files(self._checkpoint._weights().model, self._checkpoint._tokenizer(), Path(scratch))
            return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir())}

    def state(self) -> StateNames:
        return StateNames.of(self._checkpoint._weights().model)

    def digest_of(self, name: str) -> str:
        return tensor_digest(self._checkpoint._weights().read(name))

    def layer(self, name: str, kind: LayerKind) -> PreparedLayer:
        return prepare_layer(self._checkpoint.layer(name, kind), kind)


class _Stored:
    """Gives the contents of a checkpoint from a prepared store, and layers that the store lacks from the checkpoint."""

    def __init__(self, checkpoint: TrustedCheckpoint, store: PreparedStore) -> None:
        self._live, self.name, self._store = _Live(checkpoint), checkpoint.name, store
        self.release = checkpoint.release
        self._has_all = True

    def files(self) -> dict[str, bytes]:
        return self._store.blobs()

    def state(self) -> StateNames:
        facts = self._store.facts
        return StateNames(tuple(facts["names"]), tuple(facts["places"]), frozenset(facts["tied"]))

    def digest_of(self, name: str) -> str:
        """Returns the `tensor_digest` of a tensor. Only the names that a bundle can have are known, so any other name
        of a tied tensor is read from the checkpoint."""
        digest: str | None = self._store.facts["digests"].get(name)
        return self._live.digest_of(name) if digest is None else digest

    def layer(self, name: str, kind: LayerKind) -> PreparedLayer:
        if name not in self._store.layer_names:
            if self._has_all:
                _LOGGER.warning(
                    "the provider serves layers that no provider of %s serves by default: the checkpoint is read again",
                    self.name,
                )
            self._has_all = False
            return self._live.layer(name, kind)
        layer = self._store.layer(name)
        if layer.kind != kind:
            raise differs(f"the weight of {name}")
        return layer


class GroupWeights:
    """Reads the int8 weights of a provider's groups from the prepared store of a checkpoint, after the provider was
    compared with the checkpoint. No weight is kept in memory. It is safe under threads."""

    def __init__(self, stored: _Stored, manifest: Manifest) -> None:
        """Takes the store, and the manifest, which has passed the comparison."""
        self._stored = stored
        self._groups = {group.id: group for group in manifest.groups}
        self._lock = threading.Lock()

    def __call__(self, group_id: int) -> torch.Tensor:
        """Returns W̃ of a group: int8, shape (in_features, out_features); the layers' columns are concatenated.

        Raises:
            ConfigurationError: the store was changed since the comparison.
        """
        group = self._groups[group_id]
        with self._lock:  # a layer that the store lacks is read by the checkpoint, which is not thread-safe
            found = join([self._stored.layer(layer.name, layer.kind) for layer in group.layers])
            self._stored.release()
        # What is used is what is checked: a copy, which nobody can change in the file.
        weight = found.weight.clone() if len(group.layers) == 1 else found.weight
        if digest(weight, found.alpha) != group.digest:
            raise ConfigurationError(
                f"the prepared weights of {self._stored.name} were changed while in use: start again, and they are "
                "made anew"
            )
        return weight


class _NotKept(ConfigurationError):
    """Says why no prepared store can be kept."""


@contextlib.contextmanager
def _not_kept() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        advice = "free some space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "remove what is in its way"
        raise _NotKept(f"{exc.strerror or 'error'}; {advice}, or name another folder (VEILBASE_CACHE)") from exc


def _just_written(folder: Path, key: StoreKey, checked: Callable[[int, int], object]) -> PreparedStore:
    try:
        store = open_store(folder, key, checked)
    except ConfigurationError as exc:
        raise _NotKept(str(exc)) from exc
    if store is None:
        raise _NotKept("what was written there was removed at once")
    return store


def _layers(model: Any) -> dict[str, LayerKind]:
    """Returns the names and kinds of the layers that an honest provider can serve: as in provider/model/trace.py, each
    nn.Linear and Conv1D with a weight of its own."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found: dict[str, LayerKind] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear | Conv1D) or weight is None or uses[id(weight)] != 1:
            continue
        if weight.dim() == 2 and weight.dtype.is_floating_point and weight.numel():
            found[name] = "linear" if isinstance(module, nn.Linear) else "conv1d"
    return found


def _source_files(folder: Path) -> list[Path]:
    """Returns the files of a Hugging Face folder that can decide what is read from it: its own files, without pickles
    and without safetensors that are not the model's, and chat templates in the one subfolder that transformers reads.
    """
    weights = set(weight_files(folder))
    unread = (*PICKLES, *_UNREAD)
    own = [path for path in folder.iterdir() if path.is_file() and not any(map(path.match, unread))]
    templates = [path for path in (folder / "additional_chat_templates").glob("*.jinja") if path.is_file()]
    return [path for path in (*own, *templates) if path.suffix != ".safetensors" or path in weights]


def _reading(report: Report, paths: Collection[Path]) -> Callable[[int], None]:
    """Returns a function that is told of bytes that were read of files, and reports how much of them is read."""
    total, done = sum(path.stat().st_size for path in paths if path.exists()), 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(_SUMMING, megabytes(done), megabytes(total), "MB")

    return read


def _sha256(path: Path, read: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as opened:
            while part := opened.read(_READ_BYTES):
                digest.update(part)
                read(len(part))
        return digest.hexdigest()
    except OSError as exc:
        raise ConfigurationError(
            f"the trusted checkpoint's {path.name} cannot be read ({exc.strerror or type(exc).__name__})"
        ) from exc


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _find(name: str) -> LocalSource:
    if name in BUILT_IN:
        return _built_in(name)
    path = existing(name)
    if path is not None and is_gguf_name(path):
        return LocalSource(path.stem, path.resolve().parent, path.name)
    if path is not None and path.is_dir():
        return LocalSource(path.resolve().name, checked_folder(path.resolve(), name))
    if path is not None or HUB_ID.fullmatch(name) is None:
        raise no_such("checkpoint", name)
    return LocalSource(name, checked_folder(_from_hub(name), name))


def find_tokenizer(name: str | Path) -> LocalSource:
    """Finds a tokenizer that the tenant trusts, by the same rules as `TrustedCheckpoint.open`, but without weights.

    Args:
        name: a folder with tokenizer files, a GGUF file, `smollm2-135m`, or a hub id, which may end in `@revision`.

    Raises:
        ConfigurationError: there is no such tokenizer, or the file of a built-in model is not the known one.
    """
    given = str(name)
    if given in BUILT_IN:
        return _built_in(given)
    path = existing(given)
    if path is not None and is_gguf_name(path):
        return LocalSource(given, path.resolve().parent, path.name)
    if (path is None and HUB_ID.fullmatch(given) is None) or (path is not None and not path.is_dir()):
        raise no_such("tokenizer", given)
    folder = path.resolve() if path is not None else _from_hub(given, _TOKENIZER_FILES, "tokenizer")
    check_tokenizer_folder(folder, given)
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
        raise ConfigurationError(not_from_hub(what, name, exc)) from exc
    return Path(str(found))


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
    for file in weight_files(folder):
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


def _hold(source: LocalSource, report: Report) -> _Weights:
    """Loads the whole model into memory, with the options of provider/model/load.py, and returns its weights."""
    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True}
    if source.gguf_file is not None:
        options = {"dtype": torch.float32, "gguf_file": source.gguf_file}
    report(_LOADING if source.gguf_file is None else _METADATA)
    with source.opened() as folder, _reading_gguf(report) if source.gguf_file else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    state = model.state_dict()
    return _Weights(model, state.__getitem__, streamed=False)


@contextlib.contextmanager
def _reading_gguf(report: Report = unseen) -> Iterator[None]:
    """Makes transformers parse a GGUF file once instead of three times, which halves the time, hides the progress bar,
    and reports how many tensors were loaded.

    transformers has no option for this, so functions are replaced inside the context; see provider/model/load.py.
    """
    import gguf
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    originals = gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__
    dequantize, num_loaded, total = gguf.dequantize, 0, 0

    @functools.cache
    def read(path: Any) -> Any:
        nonlocal total
        opened = originals[0](path)
        total = len(opened.tensors)
        report(_LOADING, 0, total, "tensors")
        return opened

    def load(*given: Any) -> Any:
        nonlocal num_loaded
        loaded = dequantize(*given)
        num_loaded += 1
        report(_LOADING, num_loaded, total, "tensors")
        return loaded

    gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize = read, functools.cache(originals[1]), load
    tqdm.__init__ = functools.partialmethod(originals[2], disable=True)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map, tqdm.__init__ = originals
        gguf.dequantize = dequantize
