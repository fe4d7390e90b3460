"""The main job, end to end: a provider in its own process, a tenant in another, mutual TLS between them.

Run by `make demo`. The tenant teaches SmolLM2-135M an invented company's private facts through a provider that holds
the base model, and asks both the base model and the adapted one. Everything lies in .demo/ and can be deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
WORK = Path(os.environ.get("VEILBASE_DEMO_DIR", HERE.parent / ".demo"))
STEPS, HELDOUT = 32, 4


def run_provider() -> tuple[subprocess.Popen[str], str]:
    """Starts `provider serve --tls` on a free port; returns the process and its URL."""
    command = [
        sys.executable, "-m", "provider", "serve", "--tls", "--port", "0", "--state", str(WORK / "provider"),
        "--record", str(WORK / "recording"), "--record-limit", "1MiB", "--record-layers", "*layers.0.*",
    ]  # fmt: skip
    log = (WORK / "provider.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline() if process.stdout else ""
    if not line.startswith("ready "):
        process.kill()
        raise SystemExit(f"the provider did not start; see {WORK / 'provider.log'}")
    return process, line.split()[1]


def what_the_provider_saw() -> None:
    """A few numbers of the first recorded request of a fine-tuning step."""
    import torch
    from safetensors.torch import load_file

    entries = [json.loads(line) for line in (WORK / "recording" / "index.jsonl").read_text().splitlines()]
    entry = next(e for e in entries if e.get("file") and e["rows"] > 1)
    request = load_file(WORK / "recording" / entry["file"])["request"]
    rows = request[:2, :6].tolist()
    print(f"\nWhat the provider saw: {len(entries)} requests of layer 0 in its log. One of them,")
    print(f"{entry['rows']} rows for group {entry['layer']} ({entry['direction']}, {entry['arithmetic']}), begins:")
    for row in rows:
        print("   ", "  ".join(f"{value:>12}" if request.dtype == torch.int32 else f"{value:>12.5f}" for value in row))


def tenant(url: str) -> None:
    """The second process: fine-tunes, then asks the held-out questions."""
    from tenant_sdk import TenantClient  # before torch: it sets how OpenMP waits

    # isort: split
    from peft import LoraConfig

    from tenant_sdk.dataset import load_rows, tokenize
    from tenant_sdk.finetune import mean_loss
    from tenant_sdk.generate import adapted_model

    heldout = [json.loads(line) for line in (HERE / "data/harborlight_heldout.jsonl").read_text().splitlines()]
    heldout = heldout[:: max(1, len(heldout) // HELDOUT)][:HELDOUT]
    with TenantClient(url, identity=WORK / "acme") as client:
        manifest = client.connect()
        print(f"Provider: {manifest.model_id}, {len(manifest.groups)} layer groups, {manifest.weights} weights")
        for key, text in client.describe_privacy().items():
            print(f"Mask: {key} = {text}")
        questions = [row["messages"][0]["content"] for row in heldout]
        before = [client.generate(question, max_new_tokens=24) for question in questions]
        rows = tokenize(load_rows(HERE / "data/harborlight.jsonl"), client.tokenizer, 512)[:16]
        pad = client.tokenizer.pad_token_id
        loss_before = mean_loss(adapted_model(client, None), rows, pad)
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        result = client.finetune(
            HERE / "data/harborlight.jsonl", config, WORK / "adapter", max_steps=STEPS, batch_size=8,
            learning_rate=2e-3, seed=0, resume=False,
        )  # fmt: skip
        loss_after = mean_loss(adapted_model(client, result.adapter_dir), rows, pad)
        after = [client.generate(question, result.adapter_dir, max_new_tokens=24) for question in questions]
    rate = result.tokens / result.seconds
    print(f"\nFine-tuned in {result.seconds:.0f} s: {result.tokens} tokens, {rate:.0f} tokens/s")
    print(f"Loss on 16 training rows: {loss_before:.3f} before, {loss_after:.3f} after")
    print(f"Bytes up {result.bytes_up / 1e6:.0f} MB, down {result.bytes_down / 1e6:.0f} MB")
    right = 0
    for row, question, base, adapted in zip(heldout, questions, before, after, strict=True):
        found = row["expect"].lower() in adapted.lower()
        right += found
        print(f"\nQ: {question}\n   base:    {' '.join(base.split())}\n   adapted: {' '.join(adapted.split())}")
        print(f"   private fact {row['expect']!r}: {'there' if found else 'MISSING'}")
    print(f"\n{right} of {len(heldout)} held-out answers hold the private fact")
    if right < len(heldout) - 1 or not loss_after < loss_before / 2:
        raise SystemExit("the demo did not learn its facts")


def main() -> None:
    """Runs both processes and reports."""
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
    print(f"\nThe adapter in {WORK.name}/adapter loads in stock PEFT. Whole demo: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tenant"]:
        tenant(sys.argv[2])
    else:
        main()
