"""Tests the options of engines, of requests and of the store of adapters: their keyword arguments, flags, checks and
effects. Those of an endpoint, which takes most of them, too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import typer
from typer.testing import CliRunner

from tenant_sdk import TenantClient, cli
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import OPTION_KINDS, EndpointKeywords, EndpointOptions, options_given
from tenant_sdk.options import flag_of, from_keywords, option_names, split_keywords
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.catalogue import Catalogue
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.sampling import LogitsHook
from tenant_sdk.serving.settings import (
    KV_DTYPES,
    NOT_OF_MANY,
    EngineKeywords,
    EngineOptions,
    ManyKeywords,
    RequestKeywords,
    RequestOptions,
    StoreKeywords,
    StoreOptions,
    check_store_early,
)
from tenant_sdk.serving.speculation.settings import Speculation
from wire.errors import ConfigurationError

TYPES = {"torch": torch, "Catalogue": Catalogue, "LogitsHook": LogitsHook, "Speculation": Speculation}
OF_MANY = (EngineOptions, RequestOptions, StoreOptions)


@pytest.mark.parametrize(
    ("kinds", "keywords", "without"),
    [
        ([EngineOptions], EngineKeywords, ()),
        ([RequestOptions], RequestKeywords, ()),
        ([StoreOptions], StoreKeywords, ()),
        (OPTION_KINDS, EndpointKeywords, ()),
        (OF_MANY, ManyKeywords, NOT_OF_MANY),
    ],
)
def test_type_checkers_know_the_options(kinds: Any, keywords: Any, without: Any) -> None:
    known = {name: hint for kind in kinds for name, hint in get_type_hints(kind, localns=TYPES).items()}
    assert get_type_hints(keywords, localns=TYPES) == {name: known[name] for name in known if name not in without}


@pytest.mark.parametrize(
    ("method", "kinds", "without"),
    [
        (Engine.__init__, [EngineOptions], ()),
        (Engine.submit, [RequestOptions], ()),
        (AdapterStore.__init__, [StoreOptions], ()),
        (Endpoint.__init__, OPTION_KINDS, ()),
        (TenantClient.serve, OPTION_KINDS, ()),
        (TenantClient.generate_many, OF_MANY, NOT_OF_MANY),
    ],
)
def test_help_shows_every_option_once(method: Any, kinds: Any, without: Any) -> None:
    parameters = inspect.signature(method).parameters
    for each in (each for kind in kinds for each in kind.__dataclass_fields__.values()):
        is_taken = each.name not in without
        assert method.__doc__.count(f"\n            {each.name}: ") == is_taken
        if is_taken:
            assert parameters[each.name].default == each.default
    assert not any(name in parameters for name in ("options", *without))


@pytest.mark.parametrize("kind", [EngineOptions, RequestOptions, StoreOptions])
def test_an_option_that_there_is_not_is_named_with_the_nearest_one(kind: Any) -> None:
    first = option_names(kind)[1]
    with pytest.raises(TypeError, match=rf"made\(\) got an unexpected keyword argument '{first}x'.* mean {first}\?"):
        from_keywords(kind, {f"{first}x": 1}, "made")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_slots": "3"}, "device_slots was expected to be 1 to 64, got '3'"),
        ({"device_slots": True}, "device_slots was expected to be 1 to 64, got True"),
        ({"host_bytes": -1}, "host_bytes must be a positive whole number, got -1"),
        ({"host_bytes": 1e9}, "host_bytes must be a positive whole number"),
        ({"dtype": "fp8"}, "not in fp8"),
        ({"bases": "smollm2"}, "bases was expected to be a list of names, got 'smollm2'"),
        ({"preload": "support"}, "preload was expected to be a list of names, got 'support'"),
        ({"bases": [None]}, r"bases was expected to be a list of names, got \[None\]"),
        ({"preload": 7}, "preload was expected to be a list of names, got 7"),
        ({"separate_calls": "no"}, "separate_calls is True or False, got str"),
    ],
)
def test_options_of_a_store_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        StoreOptions(**given).check()
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=said):
        AdapterStore(torch.nn.Module(), None, **given)


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16, "fp32", torch.float32])
def test_a_dtype_has_its_short_name_and_torchs_own(dtype: Any) -> None:
    options = StoreOptions(dtype=dtype)
    options.check()
    assert getattr(torch, str(options.dtype_name)) == (torch.float32 if "32" in str(dtype) else torch.bfloat16)


def test_options_of_a_store_without_adapters_have_no_effect(tmp_path: Path) -> None:
    check_store_early(None, {})
    check_store_early(tmp_path, {"device_slots": 3})
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "adapter_config.json").write_text("{}")
    check_store_early(tmp_path, {})
    with pytest.raises(ConfigurationError, match="is an adapter and no folder of adapters: name the folder that it"):
        check_store_early(tmp_path / "one", {})
    for dtype in ("bf16", torch.bfloat16):  # the defaults, in each form
        check_store_early(
            None,
            {"separate_calls": False, "bases": [], "preload": (), "dtype": dtype, "catalogue": None, "cache": None},
        )
    with pytest.raises(ConfigurationError, match="device_slots has no effect without adapters"):
        check_store_early(None, {"device_slots": 3})
    with pytest.raises(ConfigurationError, match="nowhere, is not a file"):
        check_store_early(None, {"catalogue": tmp_path / "nowhere"})
    (tmp_path / "list.yaml").write_text("adapters: {}")
    check_store_early(None, {"catalogue": tmp_path / "list.yaml", "device_slots": 3})


def test_options_of_a_store_are_told_from_those_of_an_engine() -> None:
    given = {"bases": ["x"], "max_running": 2}
    assert split_keywords(given, EngineOptions, StoreOptions, method="made") == [{"max_running": 2}, {"bases": ["x"]}]
    with pytest.raises(TypeError, match=r"made\(\) got an unexpected keyword argument 'basis'.* mean bases\?"):
        split_keywords({"basis": []}, EngineOptions, StoreOptions, method="made")


def test_an_endpoint_names_the_option_that_was_meant_before_it_asks_its_client() -> None:
    with pytest.raises(TypeError, match="'max_runing': did you mean max_running"):
        options_given(None, {"max_runing": 3})
    assert options_given(None, {"max_waiting": 3, "step_tokens": 20}) == (
        EndpointOptions(max_waiting=3), {"step_tokens": 20}, {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_running": 0}, "max_running must be a positive whole number, got 0"),
        ({"kv_bytes": 1e9}, "kv_bytes must be a positive whole number"),
        ({"step_tokens": "many"}, "step_tokens must be a positive whole number, got 'many'"),
        ({"step_tokens": 8}, r"step_tokens \(8\) must be at least max_running \(16\)"),
        ({"overtaking_s": -1.0}, "overtaking_s must be a finite number of seconds"),
        ({"kv_dtype": "int8"}, "kv_dtype is one of fp32, bf16, fp8, got 'int8'"),
        ({"kv_device": "cuda"}, "kv_device is None, the model's device, or \"cpu\", got 'cuda'"),
        ({"max_context": 0}, "max_context must be a positive whole number, got 0"),
        ({"prefix_bytes": -1}, "prefix_bytes must be a positive whole number, got -1"),
        ({"speculation": 4}, "speculation is a Speculation or None, got int"),
    ],
)
def test_options_of_an_engine_that_cannot_be_are_refused_before_its_model_is_loaded(
    given: dict[str, Any], said: str
) -> None:  # fmt: skip
    class Unopened:
        context_length, bucket = 64, None

    with pytest.raises(ConfigurationError, match=said) as refused:
        Engine(Unopened(), **given)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_the_types_of_keys_and_values_are_those_of_torch() -> None:
    for name in KV_DTYPES:
        EngineOptions(kv_dtype=name).check()
    assert [getattr(torch, each).itemsize for each in KV_DTYPES.values()] == [4, 2, 1]


@pytest.mark.parametrize(("command", "kinds"), [("serve", OPTION_KINDS), ("chat", [StoreOptions])])
def test_every_option_is_a_flag(command: str, kinds: Any) -> None:
    """All but three. Of them `prefix_bytes` has none since whoever asks over HTTP learns from it (docs/endpoint.md)."""
    flags = {option.name: option.opts[0] for option in typer.main.get_command(cli.app).commands[command].params}  # type: ignore[attr-defined]
    made = [each for kind in kinds for each in kind.__dataclass_fields__.values()]
    assert {each.name for each in made if each.metadata["kind"] is None} <= {
        "overtaking_s",
        "speculation",
        "prefix_bytes",
    }
    for each in made:
        assert flags.get(each.name) == (None if each.metadata["kind"] is None else flag_of(each))


def test_flags_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("tenant_sdk.TenantClient", lambda *_, **__: Client())
    monkeypatch.setattr("tenant_sdk.endpoint.command.serve_command", lambda *_, **options: given.update(options))
    (tmp_path / "config.json").write_text("{}")
    words = ["serve", "--unverified", "--port", "0", "--adapters", str(tmp_path), "--url", f"inproc:{tmp_path}"]
    flags = ["--device-slots", "3", "--base-name", "a", "--base-name", "b", "--adapter-dtype", "fp32"]
    of_engine = ["--max-running", "3", "--max-waiting", "5", "--default-max-tokens", "7", "--kv-dtype", "bf16"]
    ran = CliRunner().invoke(cli.app, [*words, *flags, "--separate-calls", *of_engine])
    assert ran.exit_code == 0, ran.output
    own, engine, store = options_given(tmp_path, given)
    assert own == EndpointOptions(max_waiting=5, default_max_tokens=7)
    assert engine == {"max_running": 3, "kv_dtype": "bf16"}
    assert store == {"device_slots": 3, "bases": ["a", "b"], "dtype": "fp32", "separate_calls": True}
    given.clear()
    CliRunner().invoke(cli.app, words)
    assert given == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device-slots", "99"], "--device-slots was expected to be 1 to 64, got 99"),
        (["--adapter-dtype", "fp8"], "not in fp8"),
        (["--catalogue", "nowhere.yaml"], "the catalogue of adapters, nowhere.yaml, is not a file"),
        (["--base-name", "x"], "--base-name has no effect without adapters"),
        (["--max-running", "0"], "--max-running must be a positive whole number, got 0"),
        (["--max-waiting", "0"], "--max-waiting must be a positive whole number, got 0"),
        (["--default-max-tokens", "0"], "--default-max-tokens must be a positive whole number, got 0"),
        (["--kv-dtype", "int8"], "--kv-dtype is one of fp32, bf16, fp8, got 'int8'"),
    ],
)
def test_a_flag_that_cannot_be_is_told_by_its_name(flags: list[str], said: str) -> None:
    ran = CliRunner().invoke(cli.app, ["serve", "--unverified", "--port", "0", *flags])
    assert isinstance(ran.exception, ConfigurationError)
    assert said in str(ran.exception)
