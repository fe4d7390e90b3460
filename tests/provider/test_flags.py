"""Tests the flags of `provider serve`, which are made from the settings: those that are listed,
and values that are refused."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import typer

from provider.cli import app, main
from provider.config import NO_JOINING, ProviderSettings

# Each entry is (flag, type of its word, default in the help, help), as it was when each flag was written by hand.
SERVE = [
    ("--model", "str", "smollm2-135m", "Built-in name, GGUF file, Hugging Face folder or hub id."),
    ("--tls", "bool", "", "Mutual TLS; needed for any address but loopback."),
    ("--host", "str", "127.0.0.1", "Address to listen on."),
    ("--port", "int", "8443", "0 picks a free one."),
    ("--tensor-port", "str", "0", "Port of the streams; 0 picks, none: by gRPC alone."),
    ("--ipc", "Path", "", "Folder of a socket, for tenants on this host."),
    ("--names", "str", "", "Further names for the certificate, comma-separated, as tenants use them."),
    ("--state", "Path", "~/.veilbase/provider", "State directory: CA and registry."),
    ("--server-cert", "Path", "", "Certificate from `provider export-server`: no CA key is held here."),
    ("--server-key", "Path", "", "Its private key."),
    ("--registry", "Path", "", "Registry copy from `provider export-registry`."),
    ("--registry-max-age-s", "float", "3600", "Age at which the copy no longer counts."),
    ("--weights", "int8|native", "int8", "native keeps the checkpoint's weights next to int8."),
    ("--base-layers", "str", "all", "Layers to serve: patterns, comma-separated, ! excludes."),
    ("--record", "Path", "", "Write down all that tenants send (security evaluation)."),
    ("--record-limit", "str", "4GiB", "Most bytes to record."),
    ("--record-layers", "str", "all", "Patterns of layers to record."),
    ("--config", "Path", "", "YAML file with any of these settings."),
    ("--threads", "int", "", "Threads of the arithmetic, in each process."),
    ("--device", "str", "auto", "What computes: auto, cpu, cuda or cuda:N."),
    ("--gpu-windows", "str", "0: none", "Most GPU memory to share with tenants on this GPU."),
    ("--shards", "int", "1: none of their own", "Processes that share the layer groups out."),
    ("--replicas", "int", "1", "Processes a shard."),
    ("--engine", "local|ray", "local", "ray: shards and replicas are actors in a Ray cluster."),
    ("--ray-address", "str", "", "HOST:PORT of the cluster's head."),
    ("--ray-gpus", "float", "0", "GPUs of each actor."),
    ("--remote-shards", "str", "", "No longer possible: see --engine ray."),
    (
        "--batching",
        "opportunistic|none|lockstep",
        "opportunistic",
        "How requests share products; two are for comparison.",
    ),
    ("--slo-ms", "float", "", "Latency target of decode, from arrival to reply."),
    ("--max-wait-ms", "float", "20", "The longest that a request waits for company."),
    ("--busy-poll-ms", "float", "2", "The longest that an idle core looks for the next decode request."),
    ("--drain-s", "float", "10", "At the end: time for what is in flight."),
    ("--metrics-port", "int", "", "Loopback port of Prometheus' metrics; 0 picks."),
    ("--health-port", "int", "", "Loopback port of gRPC's health service; 0 picks."),
    ("--log-format", "text|json", "text", "Of the log on stderr."),
    ("--parallel", "none|tensor|fsdp", "none", "Processes started by torchrun make each product together."),
    ("--parallel-timeout-s", "float", "60", "The longest that one of them waits for another."),
]


def listed(command: str) -> list[tuple[str, str, str, str]]:
    """Returns what the command's help lists."""
    (found,) = [one for one in app.registered_commands if getattr(one.callback, "__name__", "") == command]
    annotations = {
        name: get_args(get_args(parameter.annotation)[0])[0]
        for name, parameter in inspect.signature(found.callback or main).parameters.items()
    }
    group: Any = typer.main.get_command(app)
    rows = []
    for option in group.commands[command].params:
        if option.name == "help":
            continue
        assert (option.secondary_opts, option.default, option.required) == ([], None, False)
        kind = annotations[option.name]
        word = "|".join(get_args(kind)) if get_origin(kind) else kind.__name__
        shown = option.show_default if isinstance(option.show_default, str) else ""
        rows.append((*option.opts, word, shown, option.help))
    return rows


def test_flags_types_defaults_and_help() -> None:
    assert listed("serve") == SERVE


def test_a_setting_is_a_flag_unless_it_holds_more_than_a_word_says() -> None:
    names = {flag.removeprefix("--").replace("-", "_") for flag, *_ in SERVE}
    assert names - {"config"} == set(ProviderSettings.model_fields) - {"max_in_flight_bytes", "tenant_limits"}


NO_PROVIDER = "provider state 'FOLDER/none': found no provider here: check --state, or run `provider serve --tls` or `enroll` first"  # noqa: E501
BAD, UNKNOWN, RANGE = "port: [1\n", "prt: 1\n", "port: 70000\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("serve --port 70000", "setting port: input should be less than or equal to 65535"),
        ("serve --threads 0", "setting threads: input should be greater than or equal to 1"),
        ("serve --busy-poll-ms 99", "setting busy_poll_ms: input should be less than or equal to 10"),
        ("serve --max-wait-ms -1", "setting max_wait_ms: input should be greater than or equal to 0"),
        (
            "serve --tensor-port xx",
            "setting tensor_port: input should be 'none' or input should be a valid integer, unable to parse string "
            "as an integer",
        ),
        ("serve --record-limit lots", "setting record_limit: could not parse value and unit from byte string"),
        ("serve --names a,,b --tls", r"setting names: string should match pattern '^[^,\s]*(,[^,\s]+)*$'"),
        ("serve --model=", "setting model: string should have at least 1 character"),
        ("serve --host 0.0.0.0", "without --tls only loopback is served, got --host 0.0.0.0: add --tls"),
        ("serve --ipc FOLDER", "--ipc lets tenants in by their certificates: add --tls"),
        ("serve --names a", "--names are of a certificate, which needs --tls"),
        ("serve --slo-ms 5 --batching none", "--slo-ms needs --batching opportunistic, got none"),
        ("serve --tensor-port 44", "the tensor port speaks TLS only: add --tls, or leave --tensor-port out"),
        ("serve --parallel-timeout-s 3", "--parallel-timeout-s needs --parallel"),
        ("serve --device gpu", "expected --device auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("serve --device cuda:-1", "expected --device auto, cpu, cuda or cuda:N, got 'cuda:-1'"),
        (
            "serve --device cuda --parallel tensor",
            "with --parallel all processes compute on the CPU: leave --device out",
        ),
        ("serve --shards 2 --remote-shards 1 --tls", NO_JOINING),
        ("shard --join grpcs://x:1 --identity x", NO_JOINING),
        ("enroll host --shard --out x", NO_JOINING),
        ("export-server --host a --out x --state FOLDER/none", NO_PROVIDER),
        ("export-registry --out x --state FOLDER/none", NO_PROVIDER),
        (
            "enroll acme --out x --state FOLDER/front",
            "the provider of 'FOLDER/front' holds no CA key: enrol where the key is (docs/ray.md)",
        ),
        (
            "serve --record-limit 1GiB",
            "--record-limit and --record-layers need --record, which names the folder",
        ),
        (
            "serve --metrics-port 7 --health-port 7",
            "--port, --tensor-port, --metrics-port and --health-port must be different ports",
        ),
        ("serve --config FOLDER/none.yaml", "expected a settings file, found none at 'FOLDER/none.yaml'"),
        ("serve --config FOLDER/bad.yaml", "'FOLDER/bad.yaml' is not a YAML file of settings, see line 2"),
        ("serve --config FOLDER/unknown.yaml", "FOLDER/unknown.yaml: 'prt' is no setting: the nearest is port"),
        (
            "serve --config FOLDER/range.yaml",
            "FOLDER/range.yaml: setting port: input should be less than or equal to 65535",
        ),
        (
            "serve --config FOLDER/range.yaml --port 70000",
            "setting port: input should be less than or equal to 65535",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(
    words: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "front").mkdir()  # as a provider that holds no CA key leaves it
    (tmp_path / "front" / "endpoint").write_text("grpcs://127.0.0.1:8443\n")
    for name, content in (("bad", BAD), ("unknown", UNKNOWN), ("range", RANGE)):
        (tmp_path / f"{name}.yaml").write_text(content)
    assert end_of(words.replace("FOLDER", str(tmp_path)), monkeypatch) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"provider: {text.replace('FOLDER', str(tmp_path))}\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("serve --port x", "Invalid value for '--port'"),
        ("serve --drain-s soon", "Invalid value for '--drain-s'"),
        ("serve --weights int4", "'--weights': 'int4' is not one of 'int8', 'native'"),
        ("serve --batching all", "'all' is not one of"),
        ("serve --no-tls", "No such option: --no-tls"),
        ("serve --tls=1", "'--tls' does not take a value"),
        ("serve --max-in-flight-bytes 1", "No such option: --max-in-flight-bytes"),
        ("serve --model", "'--model' requires an argument"),
        ("serve extra", "unexpected extra argument"),
    ],
)
def test_a_word_that_is_no_flag_or_of_another_type_is_refused_with_usage(
    words: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(words, monkeypatch) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert text in said.err


def end_of(words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the exit code of the command, and undoes the command's changes to the environment."""
    for name in ("GRPC_VERBOSITY", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("COLUMNS", "160")  # messages must not be wrapped
    monkeypatch.setattr(sys, "argv", ["provider", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
