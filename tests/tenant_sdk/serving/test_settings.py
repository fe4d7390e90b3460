"""Tests the options of requests and of the store of adapters: their keyword arguments, flags, checks and effects."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import typer
from typer.testing import CliRunner

from tenant_sdk import cli
from tenant_sdk.options import flag_of, from_keywords, option_names
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.catalogue import Catalogue
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.sampling import LogitsHook
from tenant_sdk.serving.settings import (
    RequestKeywords,
    RequestOptions,
    StoreKeywords,
    StoreOptions,
    check_store_early,
    split_store_options,
)
from wire.errors import ConfigurationError

TYPES = {"torch": torch, "Catalogue": Catalogue, "LogitsHook": LogitsHook}


@pytest.mark.parametrize(("kind", "keywords"), [(RequestOptions, RequestKeywords), (StoreOptions, StoreKeywords)])
def test_type_checkers_know_the_options(kind: Any, keywords: Any) -> None:
    assert get_type_hints(keywords, localns=TYPES) == get_type_hints(kind, localns=TYPES)


@pytest.mark.parametrize(("method", "kind"), [(Engine.submit, RequestOptions), (AdapterStore.__init__, StoreOptions)])
def test_help_shows_every_option(method: Any, kind: Any) -> None:
    parameters = inspect.signature(method).parameters
    for each in kind.__dataclass_fields__.values():
        assert parameters[each.name].default == each.default
        assert f"\n            {each.name}: " in method.__doc__


@pytest.mark.parametrize("kind", [RequestOptions, StoreOptions])
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
    assert split_store_options({"bases": ["x"], "max_running": 2}) == ({"bases": ["x"]}, {"max_running": 2})


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_every_option_of_a_store_is_a_flag(command: str) -> None:
    flags = {option.name: option.opts[0] for option in typer.main.get_command(cli.app).commands[command].params}  # type: ignore[attr-defined]
    for each in StoreOptions.__dataclass_fields__.values():
        assert flags[each.name] == flag_of(each)


def test_flags_become_options_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("tenant_sdk.TenantClient", lambda *_, **__: Client())
    monkeypatch.setattr("tenant_sdk.endpoint.command.serve_command", lambda *_, **options: given.update(options))
    words = ["serve", "--unverified", "--port", "0", "--adapters", str(tmp_path), "--url", f"inproc:{tmp_path}"]
    flags = ["--device-slots", "3", "--base-name", "a", "--base-name", "b", "--adapter-dtype", "fp32"]
    ran = CliRunner().invoke(cli.app, [*words, *flags, "--separate-calls"])
    assert ran.exit_code == 0, ran.output
    store, _ = split_store_options(given)
    assert store == {"device_slots": 3, "bases": ["a", "b"], "dtype": "fp32", "separate_calls": True}
    given.clear()
    CliRunner().invoke(cli.app, words)
    assert split_store_options(given)[0] == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device-slots", "99"], "--device-slots was expected to be 1 to 64, got 99"),
        (["--adapter-dtype", "fp8"], "not in fp8"),
        (["--catalogue", "nowhere.yaml"], "the catalogue of adapters, nowhere.yaml, is not a file"),
        (["--base-name", "x"], "--base-name has no effect without adapters"),
    ],
)
def test_a_flag_that_cannot_be_is_told_by_its_name(flags: list[str], said: str) -> None:
    ran = CliRunner().invoke(cli.app, ["serve", "--unverified", "--port", "0", *flags])
    assert isinstance(ran.exception, ConfigurationError)
    assert said in str(ran.exception)
