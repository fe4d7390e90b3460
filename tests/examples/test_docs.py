"""Tests that README and docs agree with the code: make targets, commands, links, byte counts and the Python snippet."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from attacks.report import command_line as attacks_cli
from noise.options import MASKS, OPTIONS
from noise.params import PARAMETERS
from provider.cli import app as provider_app
from provider.config import ProviderSettings, load_settings
from provider.operations.usage import PriceList
from provider.schedule.quota import TenantLimits
from tenant_sdk import EngineOptions, RequestOptions, StoreOptions, options
from tenant_sdk.cli import app as tenant_app
from tenant_sdk.endpoint.settings import EndpointOptions
from tenant_sdk.training.recipe import RunRecipe, flag_of, options_table
from tests.support.repository import ROOT
from wire import frame
from wire.errors import WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import deadline_s
from wire.ring import coding

ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "attacks/README.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"] + [ROOT / "wire" / "SPEC.md"]
"""The pages about the present code. The change log is left out, since it names files by earlier names."""
PACKAGES = ("runtime", "wire", "noise", "tenant_sdk", "provider", "attacks", "benchmarks", "examples", "tests")
APPS = {"provider": provider_app, "tenant": tenant_app}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(re.sub(r"\$\{\w+:-([\w-]+)\}", r"\1", line), comments=True) for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] in APPS:
            command = typer.main.get_command(APPS[words[0]]).commands[words[1]]
            command.make_context(words[1], words[2:])  # raises on an unknown option, a missing argument or a wrong type
        elif words[0] == "python":
            assert words[1] == "-m"
            assert importlib.util.find_spec(words[2]) is not None
            if words[2] in ("attacks.extract_lora", "attacks.recover_prompts"):
                attacks_cli.make_parser(words[2], "").parse_args(words[3:])  # exits if an option is unknown
        else:
            assert words[0] == "source"


def test_readme_shows_the_two_commands() -> None:
    shown = commands(ROOT / "README.md")
    assert shown[:2] == [["make", "demo"], ["make", "test"]]
    assert sum(words[0] in APPS for words in shown) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page)):
        assert (page.parent / target).exists(), target


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def is_there(name: str) -> bool:
    """Returns whether a dotted name is one of this repository's folders or modules, or something in one of them."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.is_dir() or path.with_suffix(".py").is_file():
            held: object = importlib.import_module(".".join(parts[:end]))
            return all((held := getattr(held, part, None)) is not None for part in parts[end:])
    return False


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_files_and_modules_that_pages_name_are_there(page: Path) -> None:
    """A file name without a folder must exist in some folder. A path may also be one of torch's."""
    names = {file.name for folder in (*PACKAGES, "docs") for file in (ROOT / folder).rglob("*.*")}
    names |= {"setup.py", "lock.py"}
    text = prose(page)
    if page.name == "upgrade.md":
        text = re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.MULTILINE)  # the first column has what was there before
    assert text.count("`") % 2 == 0
    quoted = "\n".join(re.findall(r"`([^`]+)`", text))
    for path in re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)}|docs)/[\w./-]*", text):
        assert (ROOT / path.rstrip(".")).exists(), path
    for path in re.findall(r"[\w./-]+\.(?:py|[ch])\b", quoted):
        found = (ROOT / path, Path(torch.__file__).parents[1] / path)
        assert any(file.is_file() for file in found) if "/" in path else path in names, path
    for name in re.findall(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?![\w/])", quoted):
        assert is_there(name), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attacks.active", True),
        ("provider.net.server.Server", True),
        ("provider.net.server.Servant", False),
        ("provider.server.Server", False),
        ("tests.rpc.test_core", False),
    ],
)
def test_a_name_that_is_not_there_is_noticed(name: str, expected: bool) -> None:
    assert is_there(name) is expected


def test_readme_python(
    tiny_chat: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    replaced = {
        '"grpcs://127.0.0.1:8443", identity="acme"': repr(f"inproc:{tiny_chat}"),
        'verify="smollm2-135m"': f"verify={str(tiny_chat)!r}",
        "max_steps=20": "max_steps=2",
        "max_new_tokens=24": "max_new_tokens=3",
    }
    for shown, used in replaced.items():
        assert code.count(shown) == 1
        code = code.replace(shown, used)
    monkeypatch.chdir(workdir)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own page
    assert (workdir / "adapters/harborlight/adapter_config.json").is_file()
    assert type(names["model"]).__name__ == "LlamaForCausalLM"
    out = capsys.readouterr().out
    (shown,) = [block for block in blocks(ROOT / "docs/masks.md", "text") if block.startswith("scheme")]
    lines = [re.split(r"\s{2,}", line)[0] for line in shown.splitlines()]
    assert [re.split(r"\s{2,}", line)[0] for line in out.splitlines()][: len(lines)] == lines
    assert len(out.splitlines()) >= len(lines) + 2


def test_finetune_md_shows_tests_that_pass(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(ROOT / "docs/finetune.md", "python") if "def test_" in block]
    names: dict[str, Any] = {}
    exec(compile(code, "finetune.md", "exec"), names)  # noqa: S102 - our own page
    names["test_my_job"](tmp_path)
    names["test_a_provider_that_lies_or_goes_away"]()
    assert sum(name.startswith("test_") for name in names) == 2


def test_the_theft_of_the_attacks_readme(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    (code,) = blocks(ROOT / "attacks/README.md", "python")
    exec(compile(code, "attacks/README.md", "exec"), {})  # noqa: S102 - our own page
    shown = capsys.readouterr()
    assert (shown.err, caplog.messages, [str(each.message) for each in recwarn]) == ("", [], [])
    found = dict(re.findall(r"^(\w+): cosine with the adapter (-?[\d.]+)$", shown.out, re.MULTILINE))
    assert found["off"] == "1.000"
    assert abs(float(found["lattice"])) < 0.25  # uniform masks gave 0.195 at most, in 20,000 runs
    assert set(found) == {"off", "lattice"}


def test_masks_md_names_every_mask_and_option() -> None:
    text = (ROOT / "docs/masks.md").read_text()
    overview, *_ = text.split("\n## ")
    assert sorted(re.findall(r"^\| `([\w-]+)`", overview, re.MULTILINE)) == sorted(MASKS)
    assert all(f"\n## {mask}\n" in text for mask in MASKS)
    (lattice,) = re.findall(r"\n## lattice\n(.*?)\n## ", text, re.DOTALL)
    known = [name for name in OPTIONS["lattice"] if name != "allow_toy"]
    assert re.findall(r"^\| `(\w+)` \|", lattice, re.MULTILINE) == known
    for chosen in PARAMETERS.values():
        assert f"{chosen.bits} bits" in lattice


def test_finetune_md_lists_every_option() -> None:
    """The table is made from the options; `options_table()` prints it."""
    assert options_table() in (ROOT / "docs/finetune.md").read_text()
    flags = {option.name: option.opts[0] for option in typer.main.get_command(tenant_app).commands["finetune"].params}
    for name in RunRecipe.model_fields:
        if name not in ("data", "peft_config"):
            assert flags[name] == flag_of(name)


def test_serving_md_lists_every_option() -> None:
    text = (ROOT / "docs/serving.md").read_text()
    assert options.options_table(EngineOptions) in text
    assert options.options_table(RequestOptions, flags=False) in text
    assert options.options_table(StoreOptions) in text
    assert options.options_table(EndpointOptions) in (ROOT / "docs/endpoint.md").read_text()


def test_finetune_md_shows_the_recipe_as_it_is() -> None:
    (recipe,) = blocks(ROOT / "docs/finetune.md", "yaml")
    assert recipe == (ROOT / "examples/recipe.yaml").read_text()


def test_protocol_bytes() -> None:
    shown = {
        name: bytes.fromhex(body)
        for name, body in re.findall(
            r"^```hex (\w+)\n(.*?)^```$", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE | re.DOTALL
        )
    }
    call = Call(7, Direction.FORWARD, Arithmetic.RING)
    weight = torch.tensor([[1, -2], [3, 4], [-127, 5]], dtype=torch.int8)
    rows = torch.tensor([[1, 2, 3], [-1, 0, 2147483647]], dtype=torch.int32)
    reply = coding.product(rows, weight)
    request = Header(FrameType.REQUEST, 1, call, 2, 3, 0, 24, int(1000 * deadline_s(24 + 16)))
    short = torch.tensor([[64, 128, 192], [-64, 0, 2147483584]], dtype=torch.int32)
    fewer = replace(request, request_id=3, call=replace(call, bits=26, reply_bits=26), total_bytes=20)
    assert shown == {
        "hello": frame.hello(FrameType.HELLO),
        "request": b"".join(frame.frames(request, frame.tensor_bytes(rows))),
        "packed": b"".join(frame.frames(fewer, frame.rows_bytes(short, 26))),
        "reply": b"".join(frame.frames(Header(FrameType.REPLY, 1, call, 2, 2, 0, 16), frame.tensor_bytes(reply))),
        "error": Header(FrameType.ERROR, 1, code=WireCode.LIMIT).pack(),
    }


def test_settings_of_operations_md(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/operations.md"
    variables = set(re.findall(r"`VEILBASE_PROVIDER_([A-Z_]+)`", page.read_text()))
    assert {name.lower() for name in variables if name} == set(ProviderSettings.model_fields)
    text, limits, prices = blocks(page, "yaml")
    (tmp_path / "prices.yaml").write_text(prices)
    assert PriceList.read(tmp_path / "prices.yaml").model_fields_set == set(PriceList.model_fields)
    (tmp_path / "limits.yaml").write_text(limits)
    assert load_settings({}, tmp_path / "limits.yaml").tenant_limits["acme"].weight == 2
    named = {key for one in yaml.safe_load(limits)["tenant_limits"].values() for key in one}
    assert named == set(TenantLimits.model_fields)
    assert all(f"`{name}`" in page.read_text() for name in named)
    (tmp_path / "provider.yaml").write_text(text)
    settings = load_settings({"port": 1}, tmp_path / "provider.yaml")
    assert settings.model_dump(mode="json", include=set(yaml.safe_load(text))) == {**yaml.safe_load(text), "port": 1}
    monkeypatch.setenv("VEILBASE_PROVIDER_THREADS", "3")
    assert load_settings({}, tmp_path / "provider.yaml").threads == 3
