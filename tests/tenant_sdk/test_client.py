"""Tests TenantClient and `tenant`: impossible settings give one error at once, and answers equal local ones."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from noise.masks.gaussian_pool import NotPrivateWarning
from provider.identity.authority import StateDir, current_time
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from runtime import command_line
from tenant_sdk import TenantClient, Trust, cli
from tenant_sdk.embedded import connect_inproc
from tenant_sdk.generate import encode_prompt
from tenant_sdk.plan import Plan, make_plan
from tenant_sdk.testing import character_tokenizer
from tests.support.providers import serving
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, Unauthenticated, Unavailable, VeilbaseError
from wire.frame import Arithmetic, Call, Direction
from wire.payload import RowsPayload
from wire.transport import grpc_channel

PROMPT = "who?"


@pytest.fixture(scope="module")
def trained(chat_client: TenantClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides an adapter that answers with words, after enough steps on one row."""
    out = tmp_path_factory.mktemp("trained") / "adapter"
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    result = chat_client.finetune(
        ROWS[:1], lora(r=16, lora_alpha=64, target_modules=targets), out, **QUICK | {"max_steps": 40, "save_steps": 99}
    )
    return Path(result.adapter_dir)


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", "grpcs://127.0.0.1:1")
    return tmp_path / "acme"


def refused(*arguments: Any, **options: Any) -> str:
    """Returns the error line with which a client fails when it is entered."""
    with pytest.raises(VeilbaseError) as failure, TenantClient(*arguments, **options):
        pass
    assert "\n" not in str(failure.value)
    return f"{type(failure.value).__name__}: {failure.value}"


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://127.0.0.1:1", "grpcs://", "grpc://example.org:1", "grpcs://127.0.0.1:port",
            "grpcs://127.0.0.1:99999", "grpc://[::1", "inproc:/no/such/folder", "inproc:"],
)  # fmt: skip
def test_a_url_that_cannot_be(url: str, identity: Path) -> None:
    options = {} if url.startswith("inproc:") else {"identity": identity}
    assert refused(url, **options).startswith("ConfigurationError: ")


def test_options_that_cannot_be(chat_folder: Path, identity: Path) -> None:
    inproc = f"inproc:{chat_folder}"
    assert "takes no identity" in refused(inproc, identity=identity)
    assert "inproc: only" in refused("grpc://127.0.0.1:1", weights="int8")
    assert "int8 or native" in refused(inproc, weights="int4")
    for number in ("", "0", "two", "-1", "2&x"):
        assert "with N from 1" in refused(f"{inproc}?shards={number}"), number
    for device in ("", "gpu", "cuda:", "cuda:x", "cuda:123", "cpu ", "cuda&x", "cuda?shards=2", "x" * 5000):
        assert "expected inproc:MODEL?device=cuda" in refused(f"{inproc}?device={device}"), device
    assert "needs an identity" in refused("grpcs://127.0.0.1:1")
    for options in ({"mask": "invisible"}, {"arithmetic": "complex"}, {"mask_options": {"pool_size": 3}}):
        assert refused(inproc, **options).startswith(("ConfigurationError", "WeakParameters")), options
    with pytest.raises(ConfigurationError):
        TenantClient(inproc, device="abacus")
    with pytest.raises(ConfigurationError, match="background of mask='lattice' is True or False, got 'no'"):
        TenantClient("grpcs://127.0.0.1:1", identity=identity, mask_options={"background": "no"})  # before the network


def test_a_model_in_this_process_computes_on_the_device_that_the_url_names(chat_folder: Path) -> None:
    named, plain = (connect_inproc(f"inproc:{chat_folder}{end}") for end in ("?device=cpu", ""))
    assert named.manifest() == plain.manifest()
    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    group = plain.manifest().groups[0]
    payload = RowsPayload(torch.arange(3 * group.in_features, dtype=torch.int32).view(3, -1))
    replies = [each.submit(call, payload, group.out_features).result() for each in (named, plain)]
    assert torch.equal(*replies)
    named.close()


def test_an_identity_that_cannot_be(tmp_path: Path, identity: Path) -> None:
    url = "grpcs://127.0.0.1:1"
    assert "provider enroll" in refused(url, identity=tmp_path / "nowhere")
    (identity / "key.pem").chmod(0o640)
    assert "chmod 600" in refused(url, identity=identity)
    (identity / "key.pem").chmod(0o600)
    (identity / "cert.pem").write_text("garbage")
    assert "not a certificate" in refused(url, identity=identity)
    long_ago = current_time() - timedelta(days=30)
    enroll(StateDir(tmp_path / "state"), "late", tmp_path / "late", url, days=1, now=long_ago)
    with pytest.raises(Unauthenticated, match=r"expired on .* enrol again"):
        TenantClient(url, identity=tmp_path / "late")


def test_nobody_listens(identity: Path) -> None:
    with pytest.raises(Unavailable), TenantClient("grpcs://127.0.0.1:1", identity=identity):
        pass


def test_a_closed_client(chat_folder: Path, tmp_path: Path) -> None:
    with TenantClient(f"inproc:{chat_folder}") as client:
        pass
    client.close()
    for use in (client.connect, client.load_model, client.explain, lambda: client.generate("x")):
        with pytest.raises(ConfigurationError, match="closed"):
            use()
    with pytest.raises(ConfigurationError, match="closed"):
        client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)


# ---- generate -------------------------------------------------------------------------------------------------------


def local_answer(folder: Path, adapter: Path | None, prompt: Any, num_tokens: int = 24) -> str:
    tokenizer = character_tokenizer()
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    ids = encode_prompt(tokenizer, prompt)
    output = model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_greedy_text_equals_local(chat_client: TenantClient, chat_folder: Path, trained: Path) -> None:
    for adapter in (None, trained):
        assert chat_client.generate(PROMPT, adapter, 24) == local_answer(chat_folder, adapter, PROMPT)
    assert chat_client.generate(PROMPT, trained) == "Ada Quill"
    assert chat_client.generate(PROMPT, None) != "Ada Quill"


def test_messages_as_prompt(chat_client: TenantClient, chat_folder: Path, trained: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, ROWS[0]["messages"][0]]
    got = chat_client.generate(iter(messages), trained, 24)
    assert got == local_answer(chat_folder, trained, messages)
    assert chat_client.generate([ROWS[0]["messages"][0]], trained) == chat_client.generate(PROMPT, trained)


def test_streamed_pieces_are_the_text(chat_client: TenantClient, trained: Path) -> None:
    for adapter in (None, trained):
        pieces: list[str] = []
        text = chat_client.generate(PROMPT, adapter, 24, pieces.append)
        assert "".join(pieces) == text
    assert len(pieces) > 1, "nothing was streamed"


def test_sampling_options_reach_generate(chat_client: TenantClient) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(chat_client.generate(PROMPT, max_new_tokens=20, do_sample=True, temperature=2.0))
    assert texts[0] == texts[1] != texts[2]


def test_without_a_template_the_text_is_continued(tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / "plain", template=None)
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        tokenizer = client.tokenizer
        ids = torch.tensor([tokenizer("abc")["input_ids"]])
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        want = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert client.generate("abc", max_new_tokens=8) == tokenizer.decode(want[0, 3:], skip_special_tokens=True)
        with pytest.raises(ConfigurationError, match="template"):
            client.generate([{"role": "user", "content": "abc"}])


def test_prompts_that_cannot_be(chat_client: TenantClient) -> None:
    for prompt in ([], ["text"], "x" * 500):
        with pytest.raises(ConfigurationError) as failure:
            chat_client.generate(prompt)  # type: ignore[arg-type]
        assert "\n" not in str(failure.value)
        assert "xxx" not in str(failure.value)


@pytest.mark.parametrize("asked", [0, -3, 2.5, "3", True])
def test_lengths_that_cannot_be(chat_client: TenantClient, asked: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^max_new_tokens must be a positive whole number, got {asked!r}$"):
        chat_client.generate(PROMPT, max_new_tokens=asked)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompt_and_answer_fit_the_context(kind: str, tmp_path: Path) -> None:
    """A prompt and its answer may fill the context of 128 tokens, of which the chat template takes 3. If they do not
    fit, one line says how many tokens do."""
    folder, prompt = make_chat_model(tmp_path / kind, kind), "a" * 97
    # the answer goes on to its limit
    ends = {"min_new_tokens": 28, "suppress_tokens": [character_tokenizer().eos_token_id]}
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        for asked in (29, 1 << 40):
            said = f"max_new_tokens is {asked}; together they may have 128: ask for at most 28$"
            with pytest.raises(ConfigurationError, match=f"^the prompt has 100 tokens and {said}"):
                client.generate(prompt, max_new_tokens=asked)
        with pytest.raises(ConfigurationError, match=r"^the prompt has 128 tokens; .* 128: shorten .* at least 1$"):
            client.generate("a" * 125, max_new_tokens=1)
        whole = client.generate(prompt, max_new_tokens=28, **ends)
        assert client.generate(prompt, **ends) == whole, "the default is cut to what fits"


BAD_OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 0}, {"num_beams": -1}, {"num_beams": 1.5}, {"num_beams": "two"}, {"num_beams": None},
    {"num_return_sequences": 0}, {"num_return_sequences": 2}, {"max_new_tokens_": 3}, {"new\nline": 1},
    {"temperature": -1.0, "do_sample": True}, {"temperature": "hot", "do_sample": True}, {"repetition_penalty": 0},
    {"bad_words_ids": [["4711"]]}, {"eos_token_id": "4711"}, {"max_time": "long"}, {"cache_implementation": "4711"},
    {"input_ids": torch.full((1, 2), 4711)}, {"attention_mask": 1}, {"inputs": 1}, {"streamer": 1},
    {"custom_generate": "a/b"},
    {"return_dict_in_generate": True}, {"logits_processor": 3}, {"num_beams": 2, "on_text": print},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_of_generate_that_cannot_be(chat_client: TenantClient, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        chat_client.generate(PROMPT, max_new_tokens=3, **options)
    assert next(iter(options)).encode("unicode_escape").decode() in str(failure.value)
    assert "\n" not in str(failure.value)
    assert "4711" not in str(failure.value)
    assert "tensor" not in str(failure.value)


def test_errors_of_the_users_own_functions_are_not_ours(chat_client: TenantClient) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("the user's own")

    for options in ({"on_text": broken}, {"logits_processor": [broken]}, {"prefix_allowed_tokens_fn": broken}):
        with pytest.raises(ValueError, match="the user's own"):
            chat_client.generate(PROMPT, max_new_tokens=8, **options)


def test_a_provider_whose_settings_ask_for_beams(chat_client: TenantClient) -> None:
    chat_client.generate(PROMPT, max_new_tokens=1)
    assert chat_client.loaded is not None
    settings = chat_client.loaded[1].generation_config
    settings.num_beams = 2
    pieces: list[str] = []
    try:
        assert chat_client.generate(PROMPT, max_new_tokens=8, on_text=pieces.append) == "".join(pieces)
        settings.num_beams = 0
        with pytest.raises(ConfigurationError, match=r"checkpoint's generation_config\.json \(ZeroDivisionError\)$"):
            chat_client.generate(PROMPT, max_new_tokens=8)
    finally:
        chat_client.loaded = None


def test_an_adapter_that_holds_a_base_layer_whole(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(chat_folder), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match=r"adapter holds lm_head whole, a base layer held by the provider$"):
        chat_client.generate(PROMPT, tmp_path / "adapter", 3)


def test_adapters_that_cannot_be(chat_client: TenantClient, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^there is no adapter folder .*/nowhere$"):
        chat_client.generate(PROMPT, tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="is it an adapter folder"):
        chat_client.generate(PROMPT, tmp_path)
    other = tmp_path / "other"
    with TenantClient(f"inproc:{make_chat_model(tmp_path / 'gpt2', 'gpt2')}") as client:
        client.finetune(ROWS, lora(fan_in_fan_out=True), other, **QUICK | {"max_steps": 1})
    damaged = shutil.copytree(trained, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"garbage")
    no_config = shutil.copytree(trained, tmp_path / "no_config")
    (no_config / "adapter_config.json").unlink()
    for adapter, text in (
        (other, "was trained on 'gpt2'"),
        (damaged, "is no such file"),
        (no_config, "has no adapter_config"),
    ):
        with pytest.raises(ConfigurationError, match=text) as failure:
            chat_client.generate(PROMPT, adapter)
        assert "\n" not in str(failure.value)
    assert chat_client.generate(PROMPT, trained) == "Ada Quill"


def test_an_adapter_that_was_trained_again_is_loaded_again(
    chat_client: TenantClient, trained: Path, tmp_path: Path
) -> None:
    adapter = shutil.copytree(trained, tmp_path / "adapter")
    assert chat_client.generate(PROMPT, adapter) == "Ada Quill"
    chat_client.finetune(ROWS, lora(), adapter, overwrite=True, **QUICK | {"max_steps": 1})
    assert chat_client.generate(PROMPT, adapter) != "Ada Quill"


# ---- the shell ------------------------------------------------------------------------------------------------------


@pytest.fixture
def enrolled(chat_served_model: ServedModel, tmp_path: Path) -> Iterator[Path]:
    """Provides the folder of a tenant at a running provider."""
    state = StateDir(tmp_path / "served")
    with serving(chat_served_model, state=state) as server:
        enroll(state, "acme", tmp_path / "tenant", f"grpcs://127.0.0.1:{server.port}")
        yield tmp_path / "tenant"


def tenant(*arguments: Any, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tenant_sdk", *map(str, arguments)], capture_output=True, text=True,
        timeout=WAIT_S, input=text, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_finetune_and_generate_from_a_shell(enrolled: Path, chat_folder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "adapter"
    data.write_text('{"text": "hello"}\n{"text": "good day"}\n')
    done = tenant("finetune", data, "--output", out, "--identity", enrolled, "--max-steps", 2, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    first, loss, tokens = done.stdout.splitlines()
    assert first == f"adapter {out}"
    assert loss.startswith("loss ")
    assert tokens.startswith(f"tokens {2 * (len('hello') + len('good day') + 2)} ")
    assert (out / "adapter_model.safetensors").is_file()
    assert "Traceback" not in done.stderr
    answer = tenant(
        "generate", "-", "--identity", enrolled, "--adapter", out, "--max-new-tokens", 8, text=PROMPT
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("\n")
    with TenantClient((enrolled / "endpoint").read_text().strip(), identity=enrolled) as client:
        assert answer.stdout[:-1] == client.generate(PROMPT, out, 8)


@pytest.mark.slow
def test_an_error_in_a_shell_is_one_line(enrolled: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "hello"}\nnonsense\n')
    done = tenant("finetune", data, "--output", tmp_path / "out", "--identity", enrolled, "--mask", "off")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenant: ")
    assert "line 2" in line


def test_a_mistake_in_a_shell_does_not_wait_for_torch() -> None:
    code = """
import sys
from tenant_sdk import cli
sys.argv = ["tenant", "generate", "x", "--identity", "nowhere"]
try:
    cli.main()
finally:
    assert not {'torch', 'grpc', 'transformers'} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tenant: nowhere is not an identity")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--url inproc:smollm2-135m --mask latice", "got 'latice': did you mean lattice?"),
        ("--url inproc:smollm2-135m --mask shares", "two provider URLs"),
        ("--url inproc:smollm2-135m --parameters bold", "default, conservative, lean, got 'bold'"),
        ("--url inproc:smollm2-135m --pool tape", "pool of mask='lattice' is 'memory' or 'disk', got 'tape'"),
        ("--url inproc:smollm2-135m --mask off --pool disk", "mask='off' has no option 'pool'"),
        ("--url inproc:smollm2-135m --precision fine", "'exact', 'balanced' or 'short', got 'fine'"),
        ("--url inproc:smollm2-135m --precision short --verify smollm2-135m", "cannot be used with verify"),
        ("--url inproc:smollm2-135m --hints local", "needs verify= (--verify)"),
        ("--url inproc:smollm2-135m --hints disk", "'local', 'fetched', 'stream' or None, got 'disk'"),
        ("--url inproc:smollm2-135m --mask pad --hints local", "has no option 'hints'"),
        ("--url inproc:nowhere", "cannot find the model 'nowhere'"),
        ("--url nonsense", "expected grpcs://host:port, ipc:DIR or inproc:MODEL, got 'nonsense'"),
        (
            "--url https://example.org:8443/v1",
            "got 'https://example.org:8443/v1': did you mean grpcs://example.org:8443?",
        ),
        ("--url ws://example.org", "did you mean grpcs://example.org?"),
        ("--url tcp://[::1]:8443", "did you mean grpcs://[::1]:8443?"),
        ("--url localhost:8443", "got 'localhost:8443': did you mean grpcs://localhost:8443?"),
        ("--url 10.0.0.1:8443", "did you mean grpcs://10.0.0.1:8443?"),
        ("--url unix:/run/veilbase", "ipc:DIR or inproc:MODEL, got 'unix:/run/veilbase'"),
        ("--url grpcs://example.org:8443/v1", "did you mean grpcs://example.org:8443?"),
        ("--url grpcs://example.org:port", "ipc:DIR or inproc:MODEL, got 'grpcs://example.org:port'"),
        ("--url grpcs://me:secret@example.org", "inproc:MODEL, got 'grpcs://...@example.org'"),
        ("--url inproc://smollm2-135m", "inproc:MODEL, got 'inproc://smollm2-135m'"),
        ("--url grpc://example.org:1", "loopback only"),
        ("--url grpcs://127.0.0.1:1", "needs an identity"),
        ("--url ipc:", "expected ipc:DIR"),
        ("--url inproc:smollm2-135m --verify none.gguf", "cannot find the checkpoint 'none.gguf'"),
        ("--url inproc:smollm2-135m --verify no/where", "HF_HUB_OFFLINE=0"),
        ("--url inproc:smollm2-135m --tokenizer no/where", "the tokenizer 'no/where' is neither a path nor cached"),
        ("--url inproc:smollm2-135m --accept-change bundle", "accept_changes (--accept-change"),
        ("--url inproc:smollm2-135m --peer-uid 7", "peer_uid is for ipc: only"),
        ("--url inproc:smollm2-135m --pad-rows -1", "pad_rows"),
        ("--url inproc:smollm2-135m --keep lower:0", "keep (--keep) is"),
        ("--url inproc:smollm2-135m --keep attention --keep-dtype bf16", "name it with verify= (--verify)"),
    ],
)
def test_a_wrong_option_is_told_before_torch_is_needed(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client, which needs torch, is made after the checks. Its place is taken here by something that cannot be
    called."""
    monkeypatch.setattr("tenant_sdk.TenantClient", None)
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    for command in (["generate", "x"], ["chat"], ["explain"], ["finetune", "data.jsonl", "--output", "out"]):
        monkeypatch.setattr(sys, "argv", ["tenant", *command, *words.split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


def test_what_keeps_a_provider_from_being_reached_is_told(identity: Path) -> None:
    assert "nothing listens on port 1:" in refused("grpcs://127.0.0.1:1", identity=identity)
    assert "has no address (DNS)" in refused("grpcs://provider.invalid:8443", identity=identity)


def run_finetune(monkeypatch: Any, data: str, *arguments: str) -> Any:
    """Runs `tenant finetune` in this process, and returns its exit code."""
    words = ["tenant", "finetune", data, "--output", "out", *arguments]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "at least one row"),
        ("not json\n", "line 1"),
        ('{"question": "x"}\n', "exactly one of messages"),
        (None, "there is no file data.jsonl"),
    ],
)
def test_a_data_set_is_looked_at_before_a_provider(
    content: str | None, expected: str, identity: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """The provider of this identity cannot be reached. A client that connected first would fail with that error."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("data.jsonl").write_text(content)
    assert run_finetune(monkeypatch, "data.jsonl", "--identity", str(identity)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_a_data_set_may_come_through_a_pipe(chat_folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    writer = threading.Thread(target=lambda: Path("pipe").write_text(text), daemon=True)
    writer.start()
    options = ("--url", f"inproc:{chat_folder}", "--mask", "off", "--max-steps", "1", "--rank", "2")
    assert run_finetune(monkeypatch, "pipe", *options) in (None, 0)
    writer.join(WAIT_S)
    assert Path("out", "adapter_model.safetensors").is_file()
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["finetune", "generate"])
def test_ctrl_c_says_what_becomes_of_a_run(
    command: str, chat_folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(TenantClient, command, interrupt)
    words = {"finetune": ["data.jsonl", "--output", "out"], "generate": ["x"]}[command]
    monkeypatch.setattr(sys, "argv", ["tenant", command, *words, "--url", f"inproc:{chat_folder}", "--mask", "off"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert ("last checkpoint" in capsys.readouterr().err) is (command == "finetune")


def test_the_url_is_that_of_the_identity(identity: Path) -> None:
    named = (identity / "endpoint").read_text().strip()
    assert TenantClient(identity=identity, progress=False).url == named
    assert TenantClient(identity=[str(identity)], progress=False).url == named
    assert TenantClient("grpcs://127.0.0.1:2", identity=identity, progress=False).url == "grpcs://127.0.0.1:2"


def test_a_warning_names_the_users_line(chat_folder: Path) -> None:
    """However deep in the client the session is opened."""
    for use in (lambda client: client.connect(), lambda client: client.tokenizer, lambda client: client.load_model()):
        client = TenantClient(f"inproc:{chat_folder}", mask="off", progress=False)
        with pytest.warns(NotPrivateWarning) as seen:
            use(client)
        assert {one.filename for one in seen if one.category is NotPrivateWarning} == {__file__}
        client.close()


def test_without_a_url_and_an_endpoint_one_line_says_what_to_give(identity: Path) -> None:
    for given in ({}, {"identity": []}, {"identity": [identity, None]}):
        with pytest.raises(ConfigurationError, match="give a provider's URL, or identity="):
            TenantClient(**given)
    for change in (lambda file: file.write_text("\n"), lambda file: file.unlink()):
        change(identity / "endpoint")
        with pytest.raises(ConfigurationError, match="names no endpoint: give the provider's URL"):
            TenantClient(identity=identity)
    with pytest.raises(ConfigurationError, match="is not an identity"):
        TenantClient(identity=identity.with_name("nowhere"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--identity", "nowhere"], "nowhere is not an identity (No such file or directory): make one with `"),
        (["--identity", "nameless"], "nameless names no endpoint"),
        (["--identity", "acme", "--identity", "acme", "--url", "grpcs://127.0.0.1:1"], "one identity for each of 1 "),
        ([], "--identity"),
        (["--identity", "acme"], "no provider can be reached at grpcs://127.0.0.1:1"),
        (["--url", "inproc:CHAT", "--mask", "invisible"], "invisible"),
        (["--url", "inproc:CHAT", "--mask", "off", "--adapter", "nowhere"], "there is no adapter folder nowhere"),
        (["--url", "inproc:CHAT", "--mask", "off", "--max-new-tokens", "0"], "max_new_tokens must be a positive"),
        (["--url", "inproc:CHAT", "--mask", "off", "--max-new-tokens", "-1"], "max_new_tokens must be a positive"),
        (["--url", "inproc:CHAT", "--mask", "off", "--max-new-tokens", "9999"], "max_new_tokens is 9999"),
    ],
    ids=str,
)
def test_errors_of_the_command(
    arguments: list[str], expected: str, identity: Path, chat_folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(identity.parent)
    monkeypatch.setattr(grpc_channel, "STARTING_S", 0.0)  # no wait for a provider that may be starting
    Path(shutil.copytree("acme", "nameless"), "endpoint").unlink()
    arguments = [word.replace("CHAT", str(chat_folder)) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["tenant", "generate", "x", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    *before, line = err.splitlines()
    assert all("ROWS GO READABLE" in said for said in before)
    assert line.startswith("tenant: ")
    assert expected in line


def test_steps_that_take_long_are_told(chat_folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command_line, "TOLD_AFTER_S", 0.0)
    url = f"inproc:{chat_folder}"
    for progress in (False, True):
        with TenantClient(url, verify=chat_folder, cache=tmp_path / str(progress), progress=progress) as client:
            client.load_model()
        told = capsys.readouterr().err
        for line in (
            f"connecting to {url} ...",
            "making the model ...",
        ):
            assert (line in told.splitlines()) == progress


# ---- trust as one object ---------------------------------------------------------------------------------------------


def plan_of(**options: Any) -> Plan:
    """Returns the plan of a client that is not connected."""
    made: list[Plan] = []

    def noted(**given: Any) -> Plan:
        made.append(make_plan(**given))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenant_sdk.client.make_plan", noted)
        TenantClient("inproc:smollm2-135m", **options)
    return made[0]


TRUST: dict[str, Any] = {
    "verify": "smollm2-135m", "kappa": 50, "tokenizer": "smollm2-135m", "pad_rows": 64, "accept_changes": ["template"],
}  # fmt: skip


def test_trust_as_one_object_is_the_same_as_its_keywords() -> None:
    assert {each.name for each in dataclasses.fields(Trust)} == TRUST.keys()
    trust = Trust(**TRUST)
    want = plan_of(**TRUST)
    assert plan_of(trust=trust) == plan_of(trust=trust, **TRUST) == want
    for name in TRUST:
        assert plan_of(trust=trust, **{name: TRUST[name]}) == want
        assert plan_of(trust=Trust(**{name: TRUST[name]})) == plan_of(**{name: TRUST[name]}) != plan_of()
    assert plan_of(trust=trust, verify=Path("smollm2-135m")) == want


@pytest.mark.parametrize(
    ("name", "own", "given"),
    [
        ("pad_rows", 512, True), ("pad_rows", True, 512), ("verify", "models/m/", "models/m"),
        ("tokenizer", "models/m", Path("models/m/")), ("accept_changes", "model", ["model"]),
        ("accept_changes", ["model", "config"], ("config", "model")),
        ("kappa", 64, 40), ("pad_rows", True, False), ("verify", "models/m", None),
    ],
)  # fmt: skip
def test_a_keyword_that_means_the_same_as_trust_or_is_the_default(name: str, own: Any, given: Any) -> None:
    """A default cannot be told from a keyword that was left out: the documents say so."""
    trust = Trust(**{name: own})
    assert plan_of(trust=trust, **{name: given}) == plan_of(trust=trust)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("verify", "elsewhere"), ("kappa", 41), ("tokenizer", Path("elsewhere")), ("pad_rows", 65), ("pad_rows", True),
        ("accept_changes", ["model"]),
    ],
)  # fmt: skip
def test_trust_that_contradicts_a_keyword_is_refused(name: str, other: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"^{name} is .* beside trust=, whose own is .*: set it in Trust"
    ) as refused:
        plan_of(trust=Trust(**TRUST), **{name: other})
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=f"^{name} is .* beside trust=, whose own is "):
        plan_of(trust=Trust(), **{name: other})


def test_trust_that_is_no_trust_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"trust is a tenant_sdk\.Trust, got dict"):
        plan_of(trust=TRUST)
