"""Tests that every option of every command tells a wrong value before torch, transformers or gRPC is imported, which
takes seconds. An option that has no case here, nor a reason in `ANY`, fails the test: a new option needs one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from attacks.report.command_line import make_parser
from provider import cli as provider_cli
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from tenant_sdk import cli as tenant_cli
from tenant_sdk.plan_file import Bill
from tests.support.told_early import outcomes

Values = Sequence[tuple[str | Sequence[str], str]]
"""Wrong values of an option, or whole words of the command line, each with a part of what is said about it."""
REACHES_TORCH, ENDS = "reaches torch", "ends"
LONG = "x" * 300


def number(*more: tuple[str | Sequence[str], str]) -> Values:
    """Returns wrong values of an option that is a number."""
    return (("x", "valid"), ("nan", ""), *more)


def setting(name: str, *values: str) -> Values:
    """Returns wrong values of a setting of `provider serve`, whose error names it."""
    return [(value, f"setting {name}: " if value != "x" else "") for value in ("x", *values)]


# ---- what is right, but for the option in question -------------------------------------------------------------------

SEND = ("--url", "inproc:model")
BASES: Mapping[tuple[str, str], tuple[Sequence[str], str]] = {
    ("tenant", "finetune"): (("rows.jsonl", "--output", "new", *SEND), REACHES_TORCH),
    ("tenant", "plan"): (("rows.jsonl", *SEND), REACHES_TORCH),
    ("tenant", "generate"): (("who?", *SEND), REACHES_TORCH),
    ("tenant", "chat"): (SEND, REACHES_TORCH),
    ("tenant", "serve"): (("--unverified", "--port", "0", *SEND), REACHES_TORCH),
    ("tenant", "explain"): (SEND, REACHES_TORCH),
    ("tenant", "status"): (("--identity", "acme"), ENDS),
    ("provider", "serve"): (("--model", "model", "--port", "0", "--state", "state"), REACHES_TORCH),
    ("provider", "enroll"): (("globex", "--out", "globex", "--state", "state"), ENDS),
    ("provider", "revoke"): (("globex", "--state", "state"), ENDS),
    ("provider", "tenants"): (("--state", "state"), ENDS),
    ("provider", "export-server"): (("--out", "server", "--host", "localhost", "--state", "state"), ENDS),
    ("provider", "export-registry"): (("--out", "copy", "--state", "state"), ENDS),
    ("provider", "usage"): (("--state", "state"), ENDS),
    ("attacks", ""): (("--out", "report"), REACHES_TORCH),
}
"""Command lines without a mistake, and where they get; `provider status` needs a provider that runs."""

# ---- what is wrong ---------------------------------------------------------------------------------------------------

_MODEL: Values = (
    ("nowhere", "cannot find the"), ("", "cannot find the"), ("text.txt", "cannot find the"),
    ("wrong.gguf", "is no GGUF file"), ("empty", "config.json"), ("no-config", "is damaged: expected a JSON object"),
    ("owner/not-cached", "HF_HUB_OFFLINE=1"), (LONG, "cannot find the"),
)  # fmt: skip
_IDENTITY: Values = (
    ("nowhere", "is not an identity"), ("text.txt", "is not an identity"), ("empty", "is not an identity"),
    ("bad-identity", "is not a certificate"), ("bad-usage", "cannot be read as usage"),
    (("--identity", "acme"), "an inproc: provider takes no identity"),
    (("--identity", "acme", "--url", "grpc://127.0.0.1:1"), "a grpc:// URL is without TLS, so an identity"),
)  # fmt: skip
CONNECTION: Mapping[str, Values] = {
    "--url": (
        *((f"inproc:{name}", said) for name, said in _MODEL if isinstance(name, str)),
        ("https://host:8443", "did you mean grpcs://host:8443?"), ("grpcs://host:x", "expected grpcs://host:port"),
        ("grpcs://host", "needs an identity"), ("grpc://host:1", "is for loopback only"), ("ipc:", "expected ipc:DIR"),
        ("ipc:nowhere", "needs an identity"), ("nonsense", "expected grpcs://host:port"),
        ("grpcs://127.0.0.1:99999", "expected grpcs://host:port"),
        ("grpcs://127.0.0.1:0", "expected grpcs://host:port"),
    ),
    "--identity": _IDENTITY,
    "--mask": (("latice", "did you mean lattice?"), ("shares", "two")),
    "--verify": (
        *_MODEL, ("no-weights", "holds no model.safetensors"), ("pickles", "keeps its weights in pickles"),
        ("bad-weights", "is damaged: expected a safetensors file"),
    ),
    "--parameters": (("defalt", "did you mean default?"),),
    "--hints": (("locl", "hints"), ("local", "needs")),
    "--pool": (("dsk", "pool"),),
    "--keep": (
        (("--keep", "attention", "--url", "ipc:nowhere", "--identity", "acme"), "an ipc: URL carries none"),
        (("--keep", "lower:0", "--verify", "checkpoint"), "keep (--keep) is"),
        (("--keep", "attention,,", "--verify", "checkpoint"), "keep (--keep) is"),
        (("--keep", "lowr:3", "--verify", "checkpoint"), "'lower:N' for the N lowest blocks"),
    ),
    "--keep-dtype": (
        (("--keep-dtype", "bf61", "--keep", "attention", "--verify", "checkpoint"), "did you mean bf16?"),
        ("bf16", "has no effect without keep="),
        (("--keep-dtype", "bf16", "--keep", "attention"), "verify= (--verify)"),
    ),
    "--precision": (("exct", "precision"), (("--precision", "short", "--verify", "checkpoint"), "verify")),
    "--tokenizer": (
        ("nowhere", "cannot find the tokenizer"), ("text.txt", "cannot find the tokenizer"),
        ("wrong.gguf", "is no GGUF file"), ("empty", "tokenizer files"), ("bad-tokenizer", "expected a JSON object"),
        ("owner/not-cached", "HF_HUB_OFFLINE=1"),
    ),
    "--pad-rows": number(("0", "pad_rows"), ("-5", "pad_rows")),
    "--accept-change": (("modle", "takes model, tokenizer"),),
    "--peer-uid": number(("-1", "peer_uid"), ("1000", "is for ipc: only")),
}  # fmt: skip
_POSITIVE: Values = number(("0", "must be positive"), ("-1", "must be positive"))
_FROM_0: Values = number(("-1", "must be a finite number from 0"))
_DATA: Values = (
    ("nowhere.jsonl", "there is no file"), ("wrong.jsonl", "wrong.jsonl, line 1"), ("empty", "save_to_disk"),
    ("rows.csv.gz", "unpack it first"), ("damaged.parquet", "expected a readable parquet file"),
    ("damaged.csv", "damaged.csv, line 1"), ("text.txt", "text.txt"), ("rows.jsonl/x", "expected a readable"),
    ("empty.jsonl", "empty.jsonl"),
)  # fmt: skip
RECIPE: Mapping[str, Values] = {
    "--config": (
        ("nowhere.yaml", "there is no file"), ("empty", "expected a readable recipe"), ("damaged.yaml", "is no YAML"),
        ("unknown.yaml", "is no option: the nearest is learning_rate"), ("rank.yaml", "the nearest is r"),
        ("zero.yaml", "r of peft_config must be positive"),
    ),
    "--rank": _POSITIVE,
    "--eval-data": (
        *_DATA, ("1.5", "a part between 0 and 1"), ("nan", "a part between 0 and 1"), ("0.9", "none to train on"),
        ("pairs.jsonl", "expected chosen and rejected in the rows of data and of eval_data"),
    ),
    "--max-steps": _POSITIVE, "--epochs": _POSITIVE, "--batch-size": _POSITIVE,
    "--gradient-accumulation-steps": _POSITIVE, "--learning-rate": (*_POSITIVE, ("inf", "must be positive")),
    "--lr-scheduler-type": (("cosin", "did you mean cosine?"),),
    "--warmup-steps": _FROM_0, "--weight-decay": _FROM_0, "--max-grad-norm": _FROM_0, "--max-length": _POSITIVE,
    "--truncation": (("cut", "refuse"), (("--truncation", "drop", "--pad-rows", "64"), "which pad_rows hides")),
    "--seed": (*_FROM_0, ("4294967296", "must be below 2^32")), "--save-steps": _POSITIVE,
    "--eval-steps": (*_POSITIVE, ("2", "has no effect without eval_data")),
    "--early-stopping-steps": (*_POSITIVE, ("3", "needs an evaluation")),
    "--early-stopping-threshold": (*_FROM_0, ("0.1", "has no effect without early_stopping_steps")),
    "--dpo-beta": (*_POSITIVE, ("0.2", "has no effect without rows with chosen and rejected")),
    "--dpo-loss": (("hing", "did you mean hinge?"), ("hinge", "has no effect without rows with chosen")),
    "--window-tokens": (
        *_POSITIVE, ("4", "expected at least 8"),
        (("pairs.jsonl", "--window-tokens", "64"), "is not possible with preferences"),
    ),
    "data": (*_DATA, (
        ("rows.jsonl", "--cache-frozen-prefix", "--config", "upper.yaml", "--epochs", "1"), "without a second epoch"
    ), (("rows.jsonl", "--cache-frozen-prefix"), "adapter on the lowest block"), (
        ("rows.jsonl", "--cache-frozen-prefix", "--config", "prompt.yaml"), "not possible with prompt learning"
    )),
    "--checkpointing": (("some", "auto"), (("--checkpointing", "none", "--memory-budget-mb", "5"), "memory_budget_mb")),
    "--memory-budget-mb": (*_FROM_0, (("--memory-budget-mb", "5", "--window-tokens", "64"), "needs checkpointing")),
}  # fmt: skip
OF_A_RUN: Mapping[str, Values] = {
    "--output": (
        ("adapters/there", "holds an adapter already"), ("text.txt", "holds something other"), (LONG, "at most"),
        ("text.txt/new", "is no folder"), ("adapters", "holds something other"),
        ("begun", "a run with other data or settings (seed (--seed) is 0, theirs is 7)"),
        (("--output", "fresh", "--resume"), "no complete checkpoint in .fresh.checkpoints"),
        (("--output", "spoilt"), "met a NaN or infinite value"),
        ("/proc/x", "/proc/x cannot be written: nothing can be"),
        ("/sys/x/y", "nothing can be made in '/sys'"),
    ),
    "--plan": (
        ("nowhere.json", "there is no plan"), ("empty", "cannot be read: Is a directory"), ("text.txt", "is no plan"),
        ("other-plan.json", "is no plan"), ("rows.jsonl", "is no plan"),
        ("plan.json", "changed since: seed (--seed) is 0, the plan's is 7; nothing was sent"),
        (("--plan", "plan.json", "--seed", "7", "--mask", "off"), "the mask (--mask) is off, the plan's is lattice"),
    ),
    "--report-to": (("wandb", "must be 'tensorboard' or None"),),
    "--log-dir": (
        (("--log-dir", "text.txt", "--report-to", "tensorboard"), "text.txt"),
        (("--log-dir", "/proc/x", "--report-to", "tensorboard"), "nothing can be made in '/proc'"),
        ("logs", "has no effect")),
    "--provider-wait": number(("-1", "must be a finite number of seconds"), ("inf", "must be a finite number")),
}  # fmt: skip
_MAX_NEW: Values = number(("0", "must be a positive whole number"), ("-1", "must be a positive whole number"))
_WHOLE: Values = number(("0", "must be a positive whole number"))
STORE: Mapping[str, Values] = {
    "--adapters": (("nowhere", "is not a folder"), ("text.txt", "is not a folder")),
    "--catalogue": (
        ("nowhere", "is not a file"), ("empty", "is not a file"), ("damaged.yaml", "neither YAML nor JSON"),
        ("rows.jsonl", "the catalogue of adapters"), ("bad-catalogue.yaml", "at 'adapters.x.digest'"),
    ),
    "--device-slots": number(*(
        (("--device-slots", value, "--adapters", "adapters"), "was expected to be 1 to 64") for value in ("0", "65")
    )),
    "--host-bytes": number((("--host-bytes", "0", "--adapters", "adapters"), "must be a positive whole number")),
    "--adapter-dtype": ((("--adapter-dtype", "fp16", "--adapters", "adapters"), "torch.bfloat16 or torch.float32"),),
    "--base-name": (("x", "has no effect without adapters"),),
    "--preload": (
        (("--preload", "ther", "--adapters", "adapters"), "--preload must name adapters"),
        (("--preload", "../adapters/there", "--adapters", "adapters"), "--preload must name adapters"),
        (("--preload", "y", "--catalogue", "catalogue.yaml"), "--preload must name adapters"),
    ),
    "--adapter-cache": tuple(
        (("--adapter-cache", name, "--adapters", "adapters"), "cannot be written") for name in ("text.txt/x", "/proc/x")
    ),
}  # fmt: skip
_TLS: Values = (
    ("nowhere", "is not a file"), ("empty", "is not a file"),
    (("--tls-cert", "text.txt", "--tls-key", "acme/key.pem"), "a certificate chain and its private key"),
    (("--tls-cert", "acme/cert.pem", "--tls-key", "text.txt"), "a certificate chain and its private key"),
    (("--tls-cert", "acme/cert.pem", "--tls-key", "other/key.pem"), "a certificate chain and its private key"),
)  # fmt: skip
ENDPOINT: Mapping[str, Values] = {
    "--host": (
        ("192.0.2.1", "needs TLS"),
        (("--host", "127.0.0.256x", "--tls-cert", "acme/cert.pem", "--tls-key", "acme/key.pem"), "127.0.0.256x"),
    ),
    "--port": (("x", "valid"), ("-1", "equal to 0"), ("65536", "equal to 65535")),
    "--api-key-file": (
        ("nowhere", "there is no file"), ("empty", "cannot be read"), ("open-key", "can be read by other users"),
        ("bad-key", "one key of 16 to 512"),
    ),
    "--tls-cert": (*_TLS, ("acme/cert.pem", "TLS takes both")),
    "--tls-key": (*_TLS, ("acme/key.pem", "TLS takes both")),
    "--release-values": number(*((value, "0.25 to 16") for value in ("0", "-1", "0.2", "17", "inf"))),
    "--max-waiting": _WHOLE, "--default-max-tokens": _WHOLE, "--max-running": _WHOLE, "--kv-bytes": _WHOLE,
    "--kv-dtype": (("fp4", "is one of fp32"),), "--kv-device": (("cuda:9", "--kv-device is"),), "--max-context": _WHOLE,
    "--step-tokens": _WHOLE,
}  # fmt: skip
_PORT: Values = setting("port", "-1", "65536")
VALUES = ("nowhere", "empty", "text.txt")
_SERVER_FILES = ("--server-cert", "--server-key", "--registry")


def _server_file(wrong: str) -> Values:
    """Returns wrong values of one of the files of a provider without a CA key."""
    files = ("front/server_cert.pem", "front/server_key.pem", "front/registry")
    found: list[tuple[str | Sequence[str], str]] = [("x", "go together")]
    for value in VALUES:
        given = dict(zip(_SERVER_FILES, files, strict=True)) | {wrong: value}
        words = [word for pair in given.items() for word in pair]
        found.append((("--tls", "--state", "empty", *words), "expected"))
    return found


SERVE: Mapping[str, Values] = {
    "--model": [each for each in _MODEL if each[0]],
    "--host": (("192.0.2.1", "add --tls"), (("--tls", "--host", "no host"), "no host")),
    "--port": _PORT, "--tensor-port": setting("tensor_port", "-1", "65536"),
    "--ipc": (
        ("socket", "add --tls"), (("--tls", "--ipc", "text.txt"), "no folder"),
        (("--tls", "--ipc", "nowhere/socket"), "no folder"), (("--tls", "--ipc", "/proc/x"), "nothing can be made in"),
    ),
    "--names": (("a b", "names"), ("one", "needs --tls"), (("--tls", "--names", "a_b!"), "a DNS name")),
    "--state": ((("--tls", "--state", "text.txt"), "state"), (("--tls", "--state", "bad-state"), "tate")),
    **{name: _server_file(name) for name in _SERVER_FILES},
    "--registry-max-age-s": setting("registry_max_age_s", "0", "1e9", "nan"),
    "--weights": (("int4", "int8"),),
    "--record": (("text.txt", "cannot record to"), ("recorded", "holds a recording already"), ("text.txt/x", "record"),
        ("/proc/x", "cannot record to /proc/x: nothing can be made in '/proc'")),
    "--record-limit": setting("record_limit", "-1"),
    "--config": (
        ("nowhere", "found none"), ("empty", "found none"), ("damaged.yaml", "is not a YAML file"),
        ("text.txt", "is not a YAML file"), ("unknown.yaml", "is no setting"),
    ),
    "--threads": setting("threads", "0", "1025"),
    "--device": (("gpu", "expected --device auto"), ("cuda:x", "expected --device auto")),
    "--gpu-windows": (*setting("gpu_windows", "-1"), ("1MiB", "at least 8MiB"), ("64MiB", "add --ipc")),
    "--shards": setting("shards", "0", "1025"), "--replicas": setting("replicas", "0", "65"),
    "--engine": (("slurm", "local"), ("ray", "needs --ray-address")),
    "--ray-address": (("h:1", "need --engine ray"), (("--engine", "ray", "--ray-address", "auto"), "HOST:PORT")),
    "--ray-gpus": (*setting("ray_gpus", "-1", "nan"), ("1", "need --engine ray")),
    "--remote-shards": (("x", "Ray cluster"),),
    "--batching": (("all", "opportunistic"),),
    "--slo-ms": setting("slo_ms", "0", "60001", "nan"), "--max-wait-ms": setting("max_wait_ms", "-1", "60001", "nan"),
    "--busy-poll-ms": (*setting("busy_poll_ms", "-1", "1e9", "nan"), ("1", "of the tensor port")),
    "--drain-s": setting("drain_s", "-1", "3601", "nan"),
    "--metrics-port": setting("metrics_port", "-1", "65536"), "--health-port": setting("health_port", "-1", "65536"),
    "--log-format": (("xml", "text"),), "--parallel": (("data", "tensor"),),
    "--parallel-timeout-s": (*setting("parallel_timeout_s", "0", "3601", "nan"), ("5", "needs --parallel")),
}  # fmt: skip
_STATE: Values = (("nowhere", "nowhere"), ("text.txt", "text.txt"), ("bad-state", "bad-state"))
_NAME: Values = (("Not A Name", "tenant name"), ("../x", "tenant name"), ("", "tenant name"))
_KNOWN: Values = (("acmee", "did you mean acme?"),)
_DAY: Values = (("2026-7-1", "expected a day"), ("yesterday", "expected a day"), ("2026-02-30", "expected a day"))
CASES: Mapping[tuple[str, str], Mapping[str, Values]] = {
    ("tenant", "finetune"): CONNECTION | RECIPE | OF_A_RUN,
    ("tenant", "plan"): {
        **CONNECTION, **RECIPE,
        "--out": (("nowhere/plan.json", "there is no folder"), ("empty", "is a folder"), (LONG, "at most"),
            ("/proc/plan.json", "nothing can be made in '/proc'")),
        "--price-per-gb": number(("-1", "equal to 0"), ("inf", "a finite number")),
        "--price-per-hour": number(("-1", "equal to 0"), ("inf", "a finite number")),
    },
    ("tenant", "generate"): {
        **CONNECTION,
        "--adapter": (
            ("adapters/ther", "did you mean adapters/there?"), ("text.txt", "there is no adapter folder"),
            ("empty", "has no adapter_config.json"), ("no-weights", "has no adapter_config.json"),
            ("bad-adapter", "is no JSON object"), ("bad-adapter-weights", "is no such file"),
            ("pickled-adapter", "keeps its weights in a pickle"),
        ),
        "--max-new-tokens": _MAX_NEW,
    },
    ("tenant", "chat"): CONNECTION | STORE | {"--max-new-tokens": _MAX_NEW},
    ("tenant", "serve"): CONNECTION | STORE | ENDPOINT,
    ("tenant", "explain"): CONNECTION,
    ("tenant", "status"): {"--identity": _IDENTITY[:-2]},
    ("provider", "serve"): SERVE,
    ("provider", "enroll"): {
        "name": (*_NAME, ("acme", "has a valid certificate")),
        "--out": (("acme", "found an identity"), ("text.txt/x", "expected to write"), ("/proc/x", "expected to write")),
        "--state": (("text.txt", "text.txt"), ("bad-state", "bad-state")),
        "--days": number(("0", "a lifetime"), ("1000000", "a lifetime")),
        "--endpoint": (("http://host", "grpcs://host:8443"), ("", "grpcs://host:8443")),
    },
    ("provider", "revoke"): {"name": _KNOWN, "--state": _STATE},
    ("provider", "tenants"): {"--state": _STATE},
    ("provider", "export-server"): {
        "--out": (("front", "found an identity"), ("text.txt/x", "expected to write")),
        "--host": (("no host", "a DNS name"),), "--names": (("a b", "a DNS name"),), "--state": _STATE,
    },
    ("provider", "export-registry"): {"--out": (("empty", "expected to write"), ("text.txt/x", "expected to write")),
        "--state": _STATE},
    ("provider", "status"): {
        "--state": (("nowhere", "nowhere"), ("text.txt", "text.txt")),
        "--watch": number(("0", "0.1"), ("inf", "a finite number")),
    },
    ("provider", "usage"): {
        "name": _KNOWN, "--tenant": _KNOWN, "--state": _STATE[:2], "--by": (("week", "is no period"),),
        "--since": (*_DAY, (("--since", "2026-07-02", "--until", "2026-07-01"), "--since before --until")),
        "--until": _DAY,
        "--prices": (
            ("nowhere", "cannot be read"), ("empty", "cannot be read"), ("text.txt", "is not a price list"),
            ("damaged.yaml", "is not a price list"), ("unknown.yaml", "expected currency"),
            ("bad-prices.yaml", "is no key of a price list: the nearest is per_gb_up"),
        ),
    },
    ("attacks", ""): {
        "--model": (*_MODEL[:6],), "--profile": (("slow", "invalid choice"),), "--peft": (("lokr", "invalid choice"),),
        "--masks": (("latice", "no mask latice"), (",", "no mask")),
        "--adversaries": (("closed-frm", "the nearest is closed-form"), (",", "no adversary")),
        "--adapter": (("nowhere", "a PEFT adapter folder"), ("empty", "a PEFT adapter folder"), ("text.txt", "PEFT")),
        "--view": (
            (("--view", "recorded"), "needs --model"),
            (("--view", "nowhere", "--model", "model"), "is not a recording"),
            (("--view", "text.txt", "--model", "model"), "is not a recording"),
            (("--view", "bad-recording", "--model", "model"), "is damaged"),
            (("--view", "recorded", "--model", "model", "--masks", "off,pad"), "--masks is one of"),
        ),
        "--tenant": (
            ("acme", "--tenant is for --view"),
            (("--view", "recorded", "--model", "model", "--tenant", "acm"), "there are acme"),
        ),
        "--out": (("text.txt", "cannot read or write"), ("text.txt/x", "cannot read or write"),
            ("/proc/x", "cannot read or write")),
    },
}  # fmt: skip
"""The wrong values of each option, by program and command."""
ANY: Mapping[tuple[str, str, str], str] = {
    ("tenant", "generate", "prompt"): "every text is a prompt",
    ("provider", "serve", "--base-layers"): "patterns of names that only the loaded model has",
    ("provider", "serve", "--record-layers"): "patterns of names that only the loaded model has",
}
"""Options of which no value is wrong before a model is loaded, each with the reason."""


def options() -> Iterator[tuple[str, str, str]]:
    """Yields program, command and option of every option that takes a value, as the parsers have them."""
    for program, module in (("tenant", tenant_cli), ("provider", provider_cli)):
        commands: Any = typer.main.get_command(module.app).commands  # type: ignore[attr-defined]
        for name, command in commands.items():
            if not command.hidden:
                yield from ((program, name, each.opts[0]) for each in command.params if not is_flag(each))
    for name, default in vars(make_parser("attacks.extract_lora", "").parse_args([])).items():
        if not isinstance(default, bool):  # which is a flag without a value
            yield "attacks", "", f"--{name}"


def is_flag(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False)) or getattr(option, "hidden", False)


def test_every_option_has_a_case_or_a_reason() -> None:
    known = {(*command, option) for command, cases in CASES.items() for option in cases}
    assert known | set(ANY) == set(options())
    assert not known & set(ANY)


class Case(NamedTuple):
    """Holds a command line with one mistake, and a part of what is to be said about it."""

    words: Sequence[str]
    expected: str


def cases_of(program: str) -> list[Case]:
    """Returns all command lines of a program with a mistake in them."""
    found = []
    for (of, command), by_option in CASES.items():
        base = BASES.get((of, command), ((), ""))[0]
        for option, values in by_option.items() if of == program else ():
            for value, expected in values:
                words = [*changed(base, option, value)]
                found.append(Case([command, *words] if command else words, expected))
    return found


def changed(base: Sequence[str], option: str, value: str | Sequence[str]) -> Sequence[str]:
    """Returns the words of a command line with another value of an option; an argument is the first word. Where `value`
    is several words, they take the place of the options that they name, and of an argument if they begin with one."""
    if not option.startswith("--") and isinstance(value, str):
        return [value, *(base[1:] if base and not base[0].startswith("--") else base)]
    given = [option, value] if isinstance(value, str) else list(value)
    kept = list(base[1:] if not given[0].startswith("--") and base else base)
    for name in given:
        if name.startswith("--") and name in kept:
            place = kept.index(name)
            del kept[place : place + 2]
    return [*given, *kept] if not given[0].startswith("--") else [*kept, *given]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a working folder with what the command lines name."""
    write(tmp_path, {
        "rows.jsonl": '{"prompt": "a", "completion": "b"}\n' * 2, "wrong.jsonl": '{"x": 1}', "empty.jsonl": "",
        "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2, "damaged.parquet": "PAR1",
        "damaged.csv": "a,b\n1,2\n", "rows.csv.gz": "x", "text.txt": "some text", "wrong.gguf": "GGU",
        "damaged.yaml": "a: [", "bad-prices.yaml": "currency: EUR\nper_gb_upp: 1", "unknown.yaml": "lr: 1",
        "rank.yaml": "peft_config: {rank: 8}",
        "upper.yaml": "peft_config: {target_modules: [q_proj], layers_to_transform: [1]}",
        "prompt.yaml": "peft_config: {peft_type: PROMPT_TUNING, num_virtual_tokens: 4}",
        "zero.yaml": "peft_config: {r: 0}", "other-plan.json": '{"what": "finetune", "steps": 1}',
        "bad-catalogue.yaml": "adapters: {x: {source: hf://a/b, digest: none}}",
        "catalogue.yaml": f"adapters: {{x: {{source: hf://a/b, digest: 'sha256:{'0' * 64}'}}}}",
        "model/config.json": '{"model_type": "llama"}', "no-config/config.json": "[1",
        "checkpoint/config.json": "{}", "checkpoint/model.safetensors": "\x02" + "\0" * 7 + "{}",
        "no-weights/config.json": "{}", "pickles/config.json": "{}", "pickles/model.bin": "",
        "bad-weights/config.json": "{}", "bad-weights/model.safetensors": "no such file",
        "bad-tokenizer/tokenizer.json": "[1", "adapters/there/adapter_config.json": "{}",
        "adapters/there/adapter_model.safetensors": "\x02" + "\0" * 7 + "{}",
        "bad-adapter/adapter_config.json": "[", "bad-adapter/adapter_model.safetensors": "\x02" + "\0" * 7 + "{}",
        "bad-adapter-weights/adapter_config.json": "{}", "bad-adapter-weights/adapter_model.safetensors": "x",
        "pickled-adapter/adapter_config.json": "{}", "pickled-adapter/adapter_model.bin": "x",
        "recorded/index.jsonl": '{"tenant": "acme"}', "recorded/manifest.json": "{}",
        "bad-recording/index.jsonl": "{", "bad-recording/manifest.json": "{}", "open-key": "sk-" + "x" * 30,
        "bad-key": "short", "front/server_cert.pem": "", "front/server_key.pem": "", "front/registry": "",
        "plan.json": Bill("finetune", *[1] * 6, run="r", options={"seed": "7"}, mask="lattice").to_json(),
        ".begun.checkpoints/run.json": '{"fingerprint": "r", "options": {"seed": "7"}}',
        ".begun.checkpoints/checkpoint-1/complete": "", ".spoilt.checkpoints/checkpoint-1/not-finite": "",
        "bad-state/ca.pem": "x", "bad-state/ca_key.pem": "x", "bad-state/tenants.json": "x",
    })  # fmt: skip
    (tmp_path / "empty").mkdir()
    (tmp_path / "open-key").chmod(0o644)
    for name in ("bad-key", "bad-state/ca_key.pem", "front/server_key.pem"):
        (tmp_path / name).chmod(0o600)
    (tmp_path / "bad-state").chmod(0o700)
    state = StateDir(tmp_path / "state")
    for name in ("acme", "other", "bad-identity", "bad-usage"):
        enroll(state, name, tmp_path / name, "grpcs://127.0.0.1:1")
    (tmp_path / "bad-identity" / "cert.pem").write_text("no certificate")
    (tmp_path / "bad-usage" / "usage.json").write_text("[")
    return tmp_path


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("latin-1"))


@pytest.mark.parametrize("program", ["tenant", "provider", "attacks"])
def test_a_wrong_value_is_told_before_torch_is_imported(program: str, folder: Path) -> None:
    """All command lines of a program run in one process, in which torch cannot be imported."""
    cases, wrong = cases_of(program), []
    for case, told in zip(cases, outcomes(program, [case.words for case in cases], folder), strict=True):
        lines = told.said.strip().splitlines()
        said = " ".join(told.said.replace("│", " ").split())
        is_told = told.code in (1, 2) and " ".join(case.expected.split()) in said
        if told.wanted or not is_told or (told.code == 1 and len(lines) != 1) or "Traceback" in said:
            wrong.append(f"{json.dumps(case.words)}: expected {case.expected!r}, got {told}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("program", ["tenant", "provider", "attacks"])
def test_the_same_commands_without_a_mistake_go_on(program: str, folder: Path) -> None:
    """Otherwise the lines above could be refused for another mistake than theirs."""
    lines = {command: base for command, base in BASES.items() if command[0] == program}
    told = outcomes(program, [[*([name] if name else []), *base] for (_, name), (base, _) in lines.items()], folder)
    for (command, (_, end)), each in zip(lines.items(), told, strict=True):
        got = REACHES_TORCH if each.wanted else ENDS if each.code == 0 else each
        assert got == end, command


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("option", ["--config", "--api-key-file", "--adapters", "--verify"])
def test_what_may_not_be_read_is_told_before_torch_is_imported(option: str, folder: Path) -> None:
    command = "finetune" if option == "--config" else "serve"
    (folder / "closed").mkdir(mode=0) if option in ("--adapters", "--verify") else (folder / "closed").touch(0)
    (told,) = outcomes("tenant", [[command, *changed(BASES["tenant", command][0], option, "closed")]], folder)
    assert (told.code, told.wanted) == (1, ""), told
