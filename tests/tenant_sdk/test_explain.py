"""Tests the text of `tenant explain`: which lines a session has, in which words, and how a terminal shows them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import IA3Config, LoraConfig, get_peft_model

from tenant_sdk import TenantClient, for_remote_base
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.explain import ONLY_IN_USE, explain, folded, not_in_use, show, wrapped
from tenant_sdk.keep import Kept
from tenant_sdk.serving.engine import Engine
from wire.frame import Arithmetic

PLAN: Any = SimpleNamespace(tokenizer=None, bucket=None, verify=None, can_be_steered=True)


def text_of(leave_out: Any = ()) -> str:
    said = {"scheme": "lattice: a sample masks every row", "pool": "0 of 9 MB ready", "secrets": "3 of 9 reserved"}
    scheme = SimpleNamespace(name="lattice", arithmetic=Arithmetic.RING, precision="balanced", describe=lambda: said)
    group = SimpleNamespace(
        max_column_norm=400.0, max_row_norm=400.0, widths=lambda _: (32, 32), in_features=32, out_features=32
    )
    manifest = SimpleNamespace(groups=[group], recording=False, weights="int8")
    session: Any = SimpleNamespace(scheme=scheme, manifest=manifest, asked=manifest, kept=Kept(), verifier=None)
    return explain(session, PLAN, leave_out=leave_out)


def names_of(text: str) -> set[str]:
    return {line.partition("  ")[0] for line in text.splitlines()}


def test_what_is_not_in_use_is_left_out_and_named() -> None:
    short, whole = text_of(ONLY_IN_USE), text_of()
    assert names_of(whole) - names_of(short) == set(ONLY_IN_USE)
    assert names_of(short) - names_of(whole) == {"not used yet"}
    (line,) = (line for line in short.splitlines() if line.startswith("not used yet"))
    assert "once this session uses DoRA, other PEFT kinds or fine-tuning (--all" in line
    assert "not used yet" not in text_of({"a line that there is not"})


@pytest.mark.parametrize(
    ("configs", "in_use"),
    [
        ([], set()),
        ([LoraConfig()], set()),
        ([LoraConfig(use_dora=True)], {"DoRA"}),
        ([LoraConfig(), IA3Config()], {"other PEFT kinds"}),
        ([LoraConfig(init_lora_weights="pissa")], {"other PEFT kinds"}),
    ],
)
def test_what_adapters_use(configs: list[Any], in_use: set[str]) -> None:
    assert not_in_use(configs) == set(ONLY_IN_USE) - in_use


def test_a_text_is_folded_as_one_that_was_made_without_the_lines() -> None:
    short = folded(text_of(), {"DoRA", "fine-tuning"})
    assert names_of(text_of()) - names_of(short) == {"DoRA", "fine-tuning"}
    (line,) = (line for line in short.splitlines() if line.startswith("not used yet  "))
    assert "once this session uses DoRA or fine-tuning (`tenant explain --all`" in line
    assert folded(text_of(), set()) == text_of()


def endpoint_over(root: Path) -> Endpoint:
    """Returns an endpoint that can explain itself, over a folder of adapters."""
    endpoint = Endpoint.__new__(Endpoint)
    endpoint.root, endpoint.has_catalogue = root, False
    endpoint.service = SimpleNamespace(privacy=text_of())  # type: ignore[assignment]
    return endpoint


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({}, set()),
        ({"a/adapter_config.json": '{"peft_type": "LORA"}'}, set()),
        ({"a/adapter_config.json": '{"peft_type": "LORA", "use_dora": true}'}, {"DoRA"}),
        ({"a/adapter_config.json": '{"peft_type": "IA3"}'}, {"other PEFT kinds"}),
        ({"a/adapter_config.json": "["}, set(ONLY_IN_USE)),
        ({".jobs/ftjob-1/job.json": "{}"}, set(ONLY_IN_USE)),
    ],
)
def test_an_endpoint_tells_what_its_folder_uses(files: dict[str, str], shown: set[str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    endpoint = endpoint_over(tmp_path)
    assert names_of(endpoint.explain()) & set(ONLY_IN_USE) == shown
    assert endpoint.explain(everything=True) == text_of()


def test_an_endpoint_waits_for_no_pipe_and_follows_no_link_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text('{"peft_type": "IA3"}')
    for name in ("pipe", "link"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    os.mkfifo(tmp_path / "adapters/pipe/adapter_config.json")
    (tmp_path / "adapters/link/adapter_config.json").symlink_to(outside)
    assert names_of(endpoint_over(tmp_path / "adapters").explain()) & set(ONLY_IN_USE) == set()


def left_out(client: TenantClient, **options: Any) -> set[str]:
    (line,) = [line for line in client.explain(**options).splitlines() if line.startswith("not used yet")] or [""]
    return {name for name in ONLY_IN_USE if name in line}


@pytest.mark.filterwarnings("ignore::tenant_sdk.NotVerifiedWarning")
def test_python_leaves_out_what_a_session_has_not_used(chat_folder: Path, tmp_path: Path) -> None:
    """What answers have used stays told, and a model that is given away may be used with anything."""
    with TenantClient(f"inproc:{chat_folder}", cache=tmp_path, progress=False) as client:
        assert left_out(client) == set(ONLY_IN_USE)
        assert left_out(client, everything=True) == set()
        config = for_remote_base(LoraConfig(use_dora=True, target_modules=["q_proj"]))
        get_peft_model(client.load_model(), config).save_pretrained(tmp_path / "dora")
        assert left_out(client) == set()
    with TenantClient(f"inproc:{chat_folder}", cache=tmp_path, progress=False) as client:
        client.generate("who?", max_new_tokens=1)
        assert left_out(client) == set(ONLY_IN_USE)
        client.generate("who?", tmp_path / "dora", max_new_tokens=1)
        client.generate("who?", max_new_tokens=1)
        assert left_out(client) == set(ONLY_IN_USE) - {"DoRA"}
        with Engine(client):
            assert left_out(client) == set()


def test_words_say_what_a_line_is_about() -> None:
    lines = dict(line.split("  ", 1) for line in text_of().splitlines())
    for name, word in (("pool", "masks made ahead"), ("secrets", "one-time keys"), ("row counts", "of one token")):
        assert word in lines[name]
    assert lines["secrets"].endswith("3 of 9 reserved")


@pytest.mark.parametrize("width", [60, 80, 132])
def test_a_terminal_gets_lines_of_its_width(width: int) -> None:
    text = text_of()
    lines = wrapped(text, width).splitlines()
    assert max(len(line) for line in lines) <= width
    names = [line for line in lines if not line.startswith(" ")]
    assert len(names) == len(text.splitlines())
    column = text.splitlines()[0].index("lattice:")
    assert all(line[:column].isspace() and line[column] != " " for line in lines if line.startswith(" "))
    assert " ".join(wrapped(text, width).split()) == " ".join(text.split())


def test_a_narrow_terminal_and_a_pipe_get_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of()
    assert wrapped(text, 10) == text
    monkeypatch.setenv("COLUMNS", "60")
    show(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(text)
    assert capsys.readouterr().out == f"{wrapped(text, 60)}\n"
