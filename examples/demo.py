"""Runs the main job end to end, with a provider and a tenant in two processes and mutual TLS between them.

`make demo` runs this script. The tenant teaches SmolLM2-135M an invented company's private facts, through a provider
that holds the base model and sees only masked rows. Then the tenant asks both the base model and the adapted model.
Every reply of the provider is checked against the tenant's own copy of the model. All files are in .demo/, which can be
deleted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORK = Path(os.environ.get("VEILBASE_DEMO_DIR") or os.path.relpath(HERE.parent / ".demo"))
MODEL = "smollm2-135m"
STEPS, ANSWER_TOKENS = 14, 20
EXPLAINED = ("scheme", "assumption", "parameters", "bits", "protected", "visible", "verification")
"""The names of the lines of `client.explain()` that the demo shows."""


def run_provider() -> tuple[subprocess.Popen[str], str]:
    """Starts `provider serve --tls` on a free port, and waits until it answers; returns the process and its URL."""
    command = [
        sys.executable, "-m", "provider", "serve", "--tls", "--port", "0", "--state", str(WORK / "provider"),
        "--record", str(WORK / "recording"), "--record-limit", "32MiB", "--record-layers", "*layers.0.self_attn.q_proj",
    ]  # fmt: skip
    log = (WORK / "provider.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline() if process.stdout else ""
    if not line.startswith("ready "):
        process.kill()
        raise SystemExit(f"the provider did not start; see {WORK / 'provider.log'}")
    return process, line.split()[1]


def what_the_provider_saw() -> None:
    """Prints a few numbers of the first recorded rows, and the numbers of the same rows without a mask."""
    from safetensors.torch import load_file

    entries = [json.loads(line) for line in (WORK / "recording" / "index.jsonl").read_text().splitlines()]
    entry = next(each for each in entries if each["purpose"] == "product" and each["file"])
    request = load_file(WORK / "recording" / entry["file"])["request"]
    print(f"\nWhat the provider saw of its first layer group: {len(entries)} requests. The first rows, {entry['rows']}")
    print("tokens of a question, begin with these numbers mod 2^32:")
    _print_rows(request[:2, :6].tolist())
    print("Without a mask they would have been (the tenant worked this out for the demo and sent it to nobody):")
    _print_rows(json.loads((WORK / "unmasked.json").read_text()))


def _print_rows(rows: list[list[int]]) -> None:
    for row in rows:
        print("   ", "".join(f"{value:>13}" for value in row))


def keep_unmasked(client: Any, question: str) -> None:
    """Writes the first numbers of the first rows that mask='off' would send to a file, for `what_the_provider_saw`. A
    real tenant does not do this."""
    import torch

    import wire
    from tenant_sdk import adapted_model

    model = adapted_model(client, None).model
    prompt = client.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        rows = model.layers[0].input_layernorm(model.embed_tokens(prompt["input_ids"]))[0]
    encoded, _ = wire.encode(rows, client.connect().groups[0].max_column_norm)
    (WORK / "unmasked.json").write_text(json.dumps(encoded[:2, :6].tolist()))


def print_privacy(client: Any) -> None:
    """Prints the lines of `client.explain()` that EXPLAINED names; `tenant explain` prints the others too."""
    with contextlib.redirect_stdout(io.StringIO()):
        lines = client.explain().splitlines()
    print("\nPrivacy in force (`tenant explain` says more):")
    for name, text in (re.split(r"\s{2,}", line, maxsplit=1) for line in lines):
        if name in EXPLAINED:
            print(textwrap.fill(text, 112, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16))
    print(flush=True)


def tenant(url: str) -> None:
    """Asks the held-out questions, fine-tunes, and asks them again; this function runs in the tenant's process.

    Raises:
        SystemExit: the adapted model got more than one question wrong, or its loss on training rows is not below half
            of the base model's.
    """
    import tenant_sdk

    tenant_sdk.tune()  # before torch and grpc are imported
    from peft import LoraConfig

    from tenant_sdk import adapted_model, load_rows, mean_loss, printable, tokenize

    heldout = [json.loads(line) for line in (HERE / "data/harborlight_heldout.jsonl").read_text().splitlines()]
    heldout = heldout[1::2]  # only half of them, to save time; the README has the results for all eight
    questions = [row["messages"][0]["content"] for row in heldout]
    with tenant_sdk.TenantClient(url, identity=WORK / "acme", mask="lattice", verify=MODEL) as client:
        manifest = client.connect()
        print(f"Provider: {manifest.model_id}, {len(manifest.groups)} layer groups, {manifest.weights} weights")
        print_privacy(client)
        client.fetch_hints(backward=True)
        once_bytes = client.traffic.bytes_down
        keep_unmasked(client, questions[0])
        before = [client.generate(question, max_new_tokens=ANSWER_TOKENS) for question in questions]
        rows = tokenize(load_rows(HERE / "data/harborlight.jsonl"), client.tokenizer, 512)[:16]
        pad = client.tokenizer.pad_token_id
        loss_before = mean_loss(adapted_model(client, None), rows, pad)
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        result = client.finetune(
            HERE / "data/harborlight.jsonl", config, WORK / "adapter", max_steps=STEPS, batch_size=8,
            learning_rate=5e-3, seed=0, resume=False,
        )  # fmt: skip
        loss_after = mean_loss(adapted_model(client, result.adapter_dir), rows, pad)
        after = [client.generate(question, result.adapter_dir, ANSWER_TOKENS) for question in questions]
    rate = result.tokens / result.seconds
    print(f"\nFine-tuned in {result.seconds:.0f} s: {result.tokens} tokens, {rate:.0f} tokens/s")
    print(f"Loss on 16 training rows: {loss_before:.3f} before, {loss_after:.3f} after")
    print(f"Bytes up {result.bytes_up / 1e6:.0f} MB, down {result.bytes_down / 1e6:.0f} MB;", end=" ")
    print(f"before that, once, {once_bytes / 1e6:.0f} MB of hints and bundle")
    right = 0
    for row, question, base, adapted in zip(heldout, questions, before, after, strict=True):
        found = row["expect"].lower() in adapted.lower()
        right += found
        base, adapted = (printable(" ".join(text.split())) for text in (base, adapted))
        print(f"\nQ: {question}\n   base:    {base}\n   adapted: {adapted}")
        print(f"   private fact {row['expect']!r}: {'there' if found else 'MISSING'}")
    print(f"\n{right} of {len(heldout)} held-out answers hold the private fact")
    if right < len(heldout) - 1 or not loss_after < loss_before / 2:
        raise SystemExit("the demo did not learn its facts")


def main() -> None:
    """Runs the provider and the tenant, each in its own process, and then prints what the provider saw."""
    began = time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    print("Starting `provider serve --tls` ...", flush=True)
    provider, url = run_provider()
    try:
        print(f"Provider ready at {url}", flush=True)
        enroll = [sys.executable, "-m", "provider", "enroll", "acme", "--out", str(WORK / "acme")]
        subprocess.run([*enroll, "--state", str(WORK / "provider"), "--endpoint", url], check=True)
        environment = {**os.environ, "VEILBASE_CACHE": str(WORK / "cache"), "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, __file__, "--tenant", url], check=True, env=environment)
        what_the_provider_saw()
    except subprocess.CalledProcessError as exc:
        raise SystemExit(exc.returncode) from None
    finally:
        provider.send_signal(signal.SIGTERM)
        provider.wait(timeout=30)
        shutil.rmtree(WORK / "cache" / "hints", ignore_errors=True)  # 1.2 GB, which a real tenant keeps
    print(f"\nThe adapter in {WORK.name}/adapter loads in stock PEFT. Whole demo: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    from tenant_sdk import VeilbaseError

    try:
        tenant(sys.argv[2]) if sys.argv[1:2] == ["--tenant"] else main()
    except VeilbaseError as exc:
        raise SystemExit(f"demo: {exc}") from None
