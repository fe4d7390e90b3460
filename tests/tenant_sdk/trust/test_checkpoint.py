"""Tests the comparison of a provider's offer with the checkpoint that the tenant trusts, part by part."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from noise.verify import Verifier
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from tenant_sdk.report import megabytes
from tenant_sdk.testing import CHAT_TEMPLATE, character_tokenizer
from tenant_sdk.trust import checkpoint
from tenant_sdk.trust.bundle import fetch_bundle
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tenant_sdk.trust.compare import same_bits
from tests.support.reachable import reachable
from tests.support.tiny_models import make_chat_model
from wire.errors import ConfigurationError, VerificationFailed
from wire.frame import Arithmetic, Call, Direction
from wire.manifest import Manifest, parse_manifest
from wire.prepared import StoreWriter
from wire.transport.inproc import InprocConnection


@dataclass
class Offer:
    """Holds a provider's offer, which a test changes: the served model, the manifest and a bundle."""

    served_model: ServedModel
    manifest: Manifest
    bundle: Path

    def json(self, name: str, **changes: Any) -> None:
        """Changes keys of a JSON file and, if it is the config, of the manifest's copy."""
        path = self.bundle / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if name == "config.json":
            self.announce(config={**self.manifest.config, **changes})

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], None], name: str = "model.safetensors") -> None:
        tensors = load_file(self.bundle / name)
        change(tensors)
        save_file(tensors, self.bundle / name, {"format": "pt"})

    def announce(self, **changes: Any) -> None:
        self.manifest = Manifest.model_validate({**self.manifest.model_dump(), **changes})

    def layer(self, name: str, **changes: Any) -> None:
        """Changes the manifest's entry of a layer or, by the group's name, of a group."""
        content = self.manifest.model_dump()
        for group in content["groups"]:
            for entry in (group, *group["layers"]):
                if entry["name"] == name:  # a layer alone in its group shares its name
                    entry.update({key: value for key, value in changes.items() if key in entry})
        self.announce(groups=content["groups"])


def offer_of(folder: Path, where: Path, **options: Any) -> Offer:
    served_model = ServedModel(serve_model(load(resolve(str(folder))), **options))
    connection = InprocConnection(served_model)
    manifest = parse_manifest(served_model.manifest().to_bytes())
    return Offer(served_model, manifest, fetch_bundle(connection, manifest, where))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("trusted")
    return {kind: make_chat_model(parent / kind, kind) for kind in ("llama", "gpt2", "gemma")}


@pytest.fixture(scope="session")
def honest(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Offer]:
    parent = tmp_path_factory.mktemp("honest")
    return {kind: offer_of(folder, parent) for kind, folder in folders.items()}


def copy_of(offer: Offer, where: Path) -> Offer:
    return Offer(offer.served_model, offer.manifest, Path(shutil.copytree(offer.bundle, where / "offer")))


def check(folder: Path | str, offer: Offer) -> tuple[Verifier, TrustedCheckpoint]:
    verifier, trusted = Verifier(), TrustedCheckpoint.open(folder)
    trusted.check_provider(offer.manifest, offer.bundle, verifier)
    return verifier, trusted


def projections_hold(verifier: Verifier, offer: Offer) -> None:
    """Checks that the verifier accepts the provider's own products in both directions, and refuses a changed one."""
    for group in offer.manifest.groups:
        for direction in Direction:
            cols = group.in_features if direction is Direction.FORWARD else group.out_features
            rows = torch.randint(-(2**31), 2**31, (3, cols)).to(torch.int32)
            reply = offer.served_model.compute(Call(group.id, direction, Arithmetic.RING), rows)
            verifier.check(group.id, direction, rows, reply)
    with pytest.raises(VerificationFailed):
        verifier.check(group.id, direction, rows, reply + 1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_an_honest_provider(kind: str, folders: dict[str, Path], honest: dict[str, Offer]) -> None:
    """The models have untied and tied heads, Conv1D with biases, and soft-capping. Weights are streamed, and every
    group is projected."""
    verifier, trusted = check(folders[kind], honest[kind])
    assert trusted.streamed
    projections_hold(verifier, honest[kind])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_one_at_a_time(kind: str, folders: dict[str, Path], honest: dict[str, Offer]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[kind])
    trusted = TrustedCheckpoint.open(folders[kind])
    for group in honest[kind].manifest.groups:
        for info in group.layers:
            stored = model.get_submodule(info.name).weight
            weight = trusted.layer(info.name, info.kind)
            assert weight.dtype == torch.float32
            assert torch.equal(weight, stored.t() if info.kind == "linear" else stored)
    with pytest.raises(VerificationFailed, match="has no layer nowhere"):
        trusted.layer("nowhere", "linear")


def test_progress_and_a_second_pass(folders: dict[str, Path], honest: dict[str, Offer]) -> None:
    offer, seen = honest["gpt2"], list[tuple[Any, ...]]()
    trusted = TrustedCheckpoint.open(folders["gpt2"])
    for _ in range(2):
        trusted.check_provider(offer.manifest, offer.bundle, Verifier(), lambda *told: seen.append(told))
    count = len(offer.manifest.groups)
    groups = [("comparing the provider", done, count, "groups") for done in range(count + 1)]
    assert seen == [("loading its tokenizer",), *groups] * 2


def write_gguf(file: Path) -> Path:
    """Writes a Llama model of one block and no tokenizer."""
    writer, width, draw = gguf.GGUFWriter(file, "llama"), 32, np.random.default_rng(0)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    square = {f"blk.0.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")}
    wide = {"blk.0.ffn_gate.weight": (64, width), "blk.0.ffn_up.weight": (64, width)}
    norms = dict.fromkeys(("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"), (width,))
    others = {"token_embd.weight": (40, width), "output.weight": (40, width), "blk.0.ffn_down.weight": (width, 64)}
    for name, shape in {**square, **wide, **norms, **others}.items():
        writer.add_tensor(name, draw.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_progress_of_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    offer, seen = offer_of(file, tmp_path / "bundle"), list[tuple[Any, ...]]()
    trusted = TrustedCheckpoint.open(file)
    trusted.check_provider(offer.manifest, offer.bundle, Verifier(), lambda *told: seen.append(told), cache=tmp_path)
    first, *tensors = [told for told in seen if told[0] in ("reading its metadata", "loading its tensors")]
    assert first == ("reading its metadata",)
    assert tensors == [("loading its tensors", done, 12, "tensors") for done in range(13)]
    assert seen[0] == ("reading the trusted checkpoint", 1, 1, "MB")


NUM_LAYERS = 15
"""The linear layers of a tiny Llama model, its head included."""


@pytest.mark.parametrize("is_full", [False, True])
def test_progress_ends_at_its_total_also_if_nothing_can_be_kept(
    is_full: bool, folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(writer: StoreWriter, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(StoreWriter, "add_layer", fill)
    offer, seen = honest["llama"], list[tuple[Any, ...]]()
    TrustedCheckpoint.open(folders["llama"]).check_provider(
        offer.manifest, offer.bundle, Verifier(), lambda *told: seen.append(told), cache=tmp_path
    )
    size_mb, count = megabytes(sum(map(os.path.getsize, folders["llama"].iterdir()))), len(offer.manifest.groups)
    assert seen[0] == ("reading the trusted checkpoint", 1, size_mb, "MB"), "from the start there is a total"
    assert ("preparing its weights", 0, NUM_LAYERS, "layers") in seen
    assert (("preparing its weights", NUM_LAYERS, NUM_LAYERS, "layers") in seen) != is_full
    assert seen[-1] == ("comparing the provider", count, count, "groups")
    if not is_full:
        seen.clear()
        TrustedCheckpoint.open(folders["llama"]).check_provider(
            offer.manifest, offer.bundle, Verifier(), lambda *told: seen.append(told), cache=tmp_path
        )
        stages = list(dict.fromkeys(stage for stage, *_ in seen))
        assert stages == ["reading the trusted checkpoint", "reading the prepared weights", "comparing the provider"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_second_session_reads_no_tensor_of_the_checkpoint(
    kind: str, folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gives the same answer as the checkpoint, for honest providers and for others, and fresh secrets."""
    offer = honest[kind]
    TrustedCheckpoint.open(folders[kind]).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_, **__: pytest.fail("the checkpoint was read"))
    verifiers = [Verifier(), Verifier()]
    for verifier in verifiers:
        TrustedCheckpoint.open(folders[kind]).check_provider(offer.manifest, offer.bundle, verifier, cache=tmp_path)
    one, other = (next(iter(verifier._projections.values())) for verifier in verifiers)
    assert not torch.equal(one.outer, other.outer)
    projections_hold(verifiers[0], offer)  # and it drops its secrets
    lying = copy_of(offer, tmp_path)
    lying.layer(offer.manifest.groups[0].layers[0].name, digest="0" * 64)
    with pytest.raises(VerificationFailed, match="weight of"):
        TrustedCheckpoint.open(folders[kind]).check_provider(lying.manifest, lying.bundle, Verifier(), cache=tmp_path)
    lying = copy_of(offer, tmp_path / "tensors")
    lying.tensors(lambda tensors: next(iter(tensors.values())).view(-1)[:1].add_(1))
    with pytest.raises(VerificationFailed, match="the tensor"):
        TrustedCheckpoint.open(folders[kind]).check_provider(lying.manifest, lying.bundle, Verifier(), cache=tmp_path)


def test_a_tokenizer_that_fails_once_is_not_kept_as_none(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an honest provider would be called a liar in every later session."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    offer = honest["llama"]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.AutoTokenizer, "from_pretrained", fail)
        with pytest.raises(VerificationFailed):
            TrustedCheckpoint.open(folders["llama"]).check_provider(
                offer.manifest, offer.bundle, Verifier(), cache=tmp_path
            )
    assert list((tmp_path / "prepared").iterdir()) == []
    TrustedCheckpoint.open(folders["llama"]).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)


def test_a_description_is_no_part_of_the_store(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path
) -> None:
    offer, folder = honest["llama"], Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    for text in ("one", "another"):
        (folder / "README.md").write_text(text)
        (folder / "tf_model.h5").write_text(text)
        TrustedCheckpoint.open(folder).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_a_lying_provider_changes_no_byte_of_the_store(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path
) -> None:
    stores = []
    for name, lie in (("honest", False), ("lying", True)):
        offer, cache = copy_of(honest["llama"], tmp_path / name), tmp_path / name / "cache"
        if lie:
            offer.announce(groups=offer.manifest.model_dump()["groups"][:1])
            offer.tensors(lambda tensors: next(iter(tensors.values())).view(-1)[:1].add_(1))
        with pytest.raises(VerificationFailed) if lie else contextlib.nullcontext():
            TrustedCheckpoint.open(folders["llama"]).check_provider(
                offer.manifest, offer.bundle, Verifier(), cache=cache
            )
        stores.append({path.name: path.read_bytes() for path in (cache / "prepared").iterdir()})
    assert stores[0] == stores[1]
    assert len(stores[0]) == 1


def test_a_damaged_store_is_made_anew_and_said(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offer = honest["gpt2"]
    for _ in range(2):
        TrustedCheckpoint.open(folders["gpt2"]).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    assert not caplog.messages
    (store,) = (tmp_path / "prepared").iterdir()
    sound = store.read_bytes()
    store.write_bytes(sound[:100] + b"?" + sound[101:])
    TrustedCheckpoint.open(folders["gpt2"]).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    assert len(caplog.messages) == 1
    assert "made anew: its bytes are damaged" in caplog.messages[0]
    assert store.read_bytes() == sound


def test_environments_that_share_a_cache_do_not_make_each_others_store_anew(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, seen = honest["gpt2"], []
    for version in ("1", "2", "1", "2"):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: f"{name} {version}")
        TrustedCheckpoint.open(folders["gpt2"]).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
        seen.append({path.name: path.stat().st_ino for path in (tmp_path / "prepared").iterdir()})
    assert [len(stores) for stores in seen] == [1, 2, 2, 2]
    assert seen[1] == seen[2] == seen[3]


def test_another_checkpoint_has_another_store(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path
) -> None:
    offer, folder = honest["llama"], Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    TrustedCheckpoint.open(folder).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationFailed):
        TrustedCheckpoint.open(folder).check_provider(offer.manifest, offer.bundle, Verifier(), cache=tmp_path)
    assert len(list((tmp_path / "prepared").iterdir())) == 2


def test_a_store_that_cannot_be_kept_is_said(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prepared").write_text("a file has this name")
    verifier, offer = Verifier(), honest["gpt2"]
    TrustedCheckpoint.open(folders["gpt2"]).check_provider(offer.manifest, offer.bundle, verifier, cache=tmp_path)
    projections_hold(verifier, offer)
    assert sum("not kept" in message for message in caplog.messages) == 1


def test_a_sharded_checkpoint(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path, max_shard_size="30KB")
    character_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    _, trusted = check(tmp_path, honest["llama"])
    assert trusted.streamed


def test_a_checkpoint_of_the_base_model(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    """The keys have no `transformer.` in front and there is no head, as in GPT-2's own checkpoint on the hub."""
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    GPT2LMHeadModel.from_pretrained(folders["gpt2"]).transformer.save_pretrained(tmp_path)
    shutil.copy(folders["gpt2"] / "config.json", tmp_path)
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "model.safetensors")
    _, trusted = check(tmp_path, honest["gpt2"])
    assert trusted.streamed


def with_tensors(folder: Path, where: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Makes a copy of a checkpoint with other tensors."""
    shutil.copytree(folder, where, dirs_exist_ok=True)
    tensors = load_file(where / "model.safetensors")
    change(tensors)
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    return where


def with_config(folder: Path, where: Path, **changes: Any) -> Path:
    shutil.copytree(folder, where, dirs_exist_ok=True)
    config = json.loads((where / "config.json").read_text()) | changes
    (where / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return where


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_checkpoint_that_is_converted_when_loaded(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    """The file holds fp32 numbers, and the config says 16 bits. Provider and tenant must both round to 16 bits before
    they quantise, so that their weights agree."""
    folder = with_config(folders["llama"], tmp_path / "model", dtype=dtype)
    offer = offer_of(folder, tmp_path)
    assert load_file(offer.bundle / "model.safetensors")["model.norm.weight"].dtype == getattr(torch, dtype)
    verifier, trusted = check(folder, offer)
    assert trusted.streamed
    projections_hold(verifier, offer)
    with pytest.raises(VerificationFailed):
        check(folders["llama"], offer)


def test_layers_that_are_not_served(folders: dict[str, Path], tmp_path: Path) -> None:
    """Layers that the provider does not serve come with the bundle. A wrong number in one of them is noticed there."""
    offer = offer_of(folders["llama"], tmp_path, patterns="*self_attn*")
    projections_hold(check(folders["llama"], offer)[0], offer)
    offer.tensors(lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].neg_())
    with pytest.raises(VerificationFailed, match=r"the tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        check(folders["llama"], offer)


HELD = {
    "no dtype in the config": lambda folder, where: with_config(folder, where, dtype=None),
    "two different tied tensors": lambda folder, where: with_tensors(
        folder, where, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] * 2})
    ),
    "names of an older release": lambda folder, where: with_tensors(
        folder, where, lambda tensors: tensors.update({"old.LayerNorm.gamma": torch.ones(2)})
    ),
}


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
def test_a_checkpoint_that_only_transformers_can_read(
    make: Callable[[Path, Path], Path], folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(folders["gpt2"], tmp_path / "model")
    offer = offer_of(folder, tmp_path)
    with caplog.at_level(logging.WARNING, "tenant_sdk.trust.checkpoint"):
        verifier, trusted = check(folder, offer)
    assert "held in memory" in caplog.text
    assert not trusted.streamed
    projections_hold(verifier, offer)


def test_the_same_tied_tensor_twice(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    """A checkpoint may store a tied head beside the embedding. It is accepted if both are the same."""
    folder = with_tensors(
        folders["gpt2"], tmp_path / "model",
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}),
    )  # fmt: skip
    assert check(folder, honest["gpt2"])[1].streamed


def test_a_release_number_does_not_matter(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    offer = copy_of(honest["llama"], tmp_path)
    offer.json("config.json", transformers_version="5.99.0")
    offer.json("generation_config.json", transformers_version="5.99.0")
    check(folders["llama"], offer)


def test_a_bundle_without_column_norms(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    """Providers of earlier releases give none; only adapters that need norms are refused then."""
    offer = copy_of(honest["llama"], tmp_path)
    drop_file("column_norms.safetensors")(offer)
    check(folders["llama"], offer)


def flip_last_bit(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1).view(torch.uint8)[-4] ^= 1


def flip(name: str) -> Callable[[Offer], None]:
    return lambda offer: offer.tensors(lambda tensors: flip_last_bit(tensors, name))


def set_json(name: str, **changes: Any) -> Callable[[Offer], None]:
    return lambda offer: offer.json(name, **changes)


def set_layer(name: str, **changes: Any) -> Callable[[Offer], None]:
    return lambda offer: offer.layer(name, **changes)


def swap_tokens(offer: Offer) -> None:
    path = offer.bundle / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False))


def drop_file(name: str) -> Callable[[Offer], None]:
    return lambda offer: (offer.bundle / name).unlink()


def write_file(name: str, data: bytes) -> Callable[[Offer], None]:
    return lambda offer: (offer.bundle / name).write_bytes(data)


def change_scale(offer: Offer) -> None:
    offer.tensors(lambda tensors: flip_last_bit(tensors, DOWN), "scales.safetensors")


def other_scale_name(offer: Offer) -> None:
    offer.tensors(lambda tensors: tensors.update(extra=torch.ones(3)), "scales.safetensors")


def change_norm(offer: Offer) -> None:
    offer.tensors(lambda tensors: flip_last_bit(tensors, DOWN), "column_norms.safetensors")


def other_norm_name(offer: Offer) -> None:
    offer.tensors(lambda tensors: tensors.update(extra=torch.ones(3)), "column_norms.safetensors")


def native_norms(offer: Offer) -> None:
    """Offers norms of native weights, although the manifest names int8 weights."""
    offer.tensors(
        lambda tensors: tensors.update({f"native/{name}": norms.clone() for name, norms in tensors.items()}),
        "column_norms.safetensors",
    )


def negative_zero(offer: Offer) -> None:
    """Sets the first weight of the final norm to zero in the offer."""
    offer.tensors(lambda tensors: tensors["model.norm.weight"][0].zero_())


def extra_tensor(offer: Offer) -> None:
    offer.tensors(lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(4)}))


def lost_tensor(offer: Offer) -> None:
    offer.tensors(lambda tensors: tensors.update(model=tensors.pop("model.norm.weight")))


def wider_tensor(offer: Offer) -> None:
    offer.tensors(lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].double()}))


def config_of_the_manifest(offer: Offer) -> None:
    offer.announce(config={**offer.manifest.config, "max_position_embeddings": 7})


DOWN, QKV = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj+k_proj+v_proj"
TAMPERED: dict[str, tuple[Callable[[Offer], None], str]] = {
    "embedding": (flip("model.embed_tokens.weight"), "tensor model.embed_tokens.weight"),
    "norm weight": (flip("model.layers.1.input_layernorm.weight"), "tensor model.layers.1.input_layernorm.weight"),
    "final norm, to zero": (negative_zero, "tensor model.norm.weight"),
    "dtype of a tensor": (wider_tensor, "tensor model.norm.weight"),
    "lost tensor": (lost_tensor, "tensor model.norm.weight"),
    "extra tensor": (extra_tensor, "list of tensors"),
    "tensors unreadable": (write_file("model.safetensors", b"\xff" * 64), "bundle's model.safetensors"),
    "alpha": (change_scale, f"scales of {DOWN}"),
    "another alpha": (other_scale_name, "list of scales"),
    "alpha missing": (drop_file("scales.safetensors"), "bundle's scales.safetensors"),
    "column norm": (change_norm, f"column norms of {DOWN}"),
    "another column norm": (other_norm_name, "list of column norms"),
    "native column norms": (native_norms, "list of column norms"),
    "column norms unreadable": (write_file("column_norms.safetensors", b"\xff" * 64), "bundle's column_norms"),
    "digest of a layer": (set_layer(DOWN, digest="0" * 64), f"weight of {DOWN}"),
    "digest of a group": (set_layer(QKV, digest="0" * 64), "weight of model.layers.0.self_attn.q_proj and"),
    "column norm of a layer": (set_layer(DOWN, max_column_norm=1.0), f"norm bounds of {DOWN}"),
    "row norm of a group": (set_layer(QKV, max_row_norm=1.0), "norm bounds of model.layers.0.self_attn.q_proj and"),
    "bias that is not there": (set_layer(DOWN, bias=True), f"bias of {DOWN}"),
    "kind of a layer": (set_layer("model.layers.0.self_attn.o_proj", kind="conv1d"), "weight of .*o_proj"),
    "rms_norm_eps": (set_json("config.json", rms_norm_eps=1e-3), r"config \(rms_norm_eps\)"),
    "rope theta": (
        set_json("config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        r"config \(rope_parameters\)",
    ),
    "activation": (set_json("config.json", hidden_act="gelu"), r"config \(hidden_act\)"),
    "type of a config value": (set_json("config.json", use_cache=1), r"config \(use_cache\)"),
    "extra config key": (set_json("config.json", zz_unknown=1), r"config \(a key that"),
    "config, a list": (write_file("config.json", b"[]"), "model's config"),
    "the manifest's config only": (config_of_the_manifest, r"manifest's config \(max_position_embeddings\)"),
    "end of text": (set_json("generation_config.json", eos_token_id=5), r"generation settings \(eos_token_id\)"),
    "sampling": (set_json("generation_config.json", do_sample=True), r"generation settings \(a key"),
    "no generation settings": (drop_file("generation_config.json"), "generation settings"),
    "vocabulary": (swap_tokens, "the tokenizer"),
    "tokenizer settings": (set_json("tokenizer_config.json", eos_token="<s>"), r"tokenizer \(eos_token\)"),
    "a path in the tokenizer's settings": (set_json("tokenizer_config.json", vocab_file="/x"), r"tokenizer \(a key"),
    "no tokenizer": (drop_file("tokenizer.json"), "the tokenizer"),
    "one tokenizer file more": (write_file("added_tokens.json", b"{}"), "the tokenizer"),
    "chat template": (write_file("chat_template.jinja", CHAT_TEMPLATE.encode() + b" "), "the chat template"),
    "no chat template": (drop_file("chat_template.jinja"), "the chat template"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "part"), TAMPERED.values(), ids=TAMPERED)
def test_a_forged_offer(
    tamper: Callable[[Offer], None], part: str, folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path
) -> None:
    offer = copy_of(honest["llama"], tmp_path)
    tamper(offer)
    verifier = Verifier()
    with pytest.raises(VerificationFailed, match=part) as failure:
        TrustedCheckpoint.open(folders["llama"]).check_provider(offer.manifest, offer.bundle, verifier)
    assert "\n" not in str(failure.value)
    assert "zz_unknown" not in str(failure.value)
    assert reachable(verifier, torch.Tensor) == [], "a verifier that was not fully filled can be used"


GPT2 = {
    "bias of a served layer": "transformer.h.0.attn.c_attn.bias",
    "bias of a norm": "transformer.h.1.ln_1.bias",
    "positions": "transformer.wpe.weight",
    "tied embedding": "transformer.wte.weight",
}


@pytest.mark.parametrize("name", GPT2.values(), ids=GPT2)
def test_forged_tensors_of_gpt2(name: str, folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    offer = copy_of(honest["gpt2"], tmp_path)
    flip(name)(offer)
    with pytest.raises(VerificationFailed, match=f"the tensor {name}"):
        check(folders["gpt2"], offer)


def one_weight(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors[f"{DOWN}.weight"]
    largest = weight[3].abs().max()
    weight[3, 0] = largest / 127 * torch.round(weight[3, 0] / largest * 127 + 1)  # one step of int8: α stays the same


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name].t().contiguous()


OTHER_WEIGHTS = {
    "one number": (one_weight, DOWN),
    "a transposed layer": (transposed, "model.layers.0.self_attn.o_proj"),
}


@pytest.mark.parametrize(("change", "name"), OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS)
def test_a_provider_of_other_weights(
    change: Callable[[dict[str, torch.Tensor]], None], name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The provider's manifest and bundle are consistent, so only the checkpoint shows the difference."""
    other = with_tensors(folders["llama"], tmp_path / "other", change)
    with pytest.raises(VerificationFailed, match=f"the weight of {name}"):
        check(folders["llama"], offer_of(other, tmp_path))


def test_a_provider_of_another_model(folders: dict[str, Path], honest: dict[str, Offer]) -> None:
    with pytest.raises(VerificationFailed, match="model's config"):
        check(folders["llama"], honest["gpt2"])


def test_a_checkpoint_without_a_tokenizer(folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path) -> None:
    """A checkpoint without a tokenizer fails the check, because there is nothing to compare the provider's tokenizer
    with."""
    AutoModelForCausalLM.from_pretrained(folders["llama"]).save_pretrained(tmp_path)
    with pytest.raises(VerificationFailed, match=r"tokenizer|chat template"):
        check(tmp_path, honest["llama"])


def test_same_bits() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    for other in (-zero, zero.double(), zero.view(1, 1), torch.zeros(2)):
        assert not same_bits(zero, other)


def hub_cache(folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes a folder with the layout of the hub's cache and one snapshot."""
    commit = "a" * 40
    repo = where / "models--acme--tiny"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(where))
    return commit


def test_a_hub_id_from_the_cache(
    folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub_cache(folders["llama"], tmp_path, monkeypatch)
    check("acme/tiny", honest["llama"])
    check(f"acme/tiny@{commit}", honest["llama"])
    with pytest.raises(ConfigurationError, match="neither a path nor cached here, and HF_HUB_OFFLINE=1"):
        TrustedCheckpoint.open("acme/tiny@" + "b" * 40)
    with pytest.raises(ConfigurationError, match="neither a path nor cached here, and HF_HUB_OFFLINE=1"):
        TrustedCheckpoint.open("acme/other")


@pytest.mark.parametrize("name", ["", "nothing-here", "no/such/path", "a b/c", "acme/tiny@", "../x"])
def test_names_that_are_no_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # or a folder that happens to be beside ours counts
    with pytest.raises(ConfigurationError, match="cannot find the checkpoint"):
        TrustedCheckpoint.open(name)


def test_pickles_are_not_opened(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="pickles"):
        TrustedCheckpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"no model\.safetensors"):
        TrustedCheckpoint.open(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        TrustedCheckpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", b"\xff" * 64, "is damaged: expected a safetensors file"),
        ("config.json", b"\xff" * 64, "is damaged: expected a JSON object"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{" + b"\xff" * 64, "cannot read the trusted checkpoint"),
        ("config.json", b"{}", "cannot read the trusted checkpoint"),
    ],
)
def test_a_damaged_checkpoint(
    name: str, content: bytes, expected: str, folders: dict[str, Path], honest: dict[str, Offer], tmp_path: Path
) -> None:
    """The damaged checkpoint is the tenant's own, so the error must not accuse the provider."""
    shutil.copytree(folders["llama"], tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=expected) as failure:
        check(tmp_path, honest["llama"])
    assert "\n" not in str(failure.value)


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_from_its_own_file(smollm2: Path, tmp_path: Path) -> None:
    """The checkpoint is kept in memory for the comparison, and freed afterwards."""
    offer = offer_of(smollm2, tmp_path)
    verifier, trusted = check("smollm2-135m", offer)
    assert trusted._loaded is None
    group = offer.manifest.groups[0]
    rows = torch.randint(-(2**31), 2**31, (2, group.in_features)).to(torch.int32)
    reply = offer.served_model.compute(Call(0, Direction.FORWARD, Arithmetic.RING), rows)
    verifier.check(0, Direction.FORWARD, rows, reply)
    name = group.layers[0].name
    assert torch.equal(TrustedCheckpoint.open(smollm2).layer(name, "linear"), trusted.layer(name, "linear"))
