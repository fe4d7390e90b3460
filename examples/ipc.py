"""Runs a provider and a tenant on one host that talk through a socket in a folder, without TCP between them.

    python examples/ipc.py                      # SmolLM2-135M, two steps of fine-tuning and an answer
    python examples/ipc.py --mask off --max-steps 1

Each side is a process. Both prove who they are by their certificates, as over a network. After that, frames are not
encrypted. Only the two processes, root and the provider's own user can read the frames, whose rows are masked (unless
the mask is off). The provider also opens its ports for other hosts. docs/operations.md, "On one host", says how to run
the two processes yourself.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tenant_sdk

tenant_sdk.tune()  # first: torch and grpc read the variables that it sets once, when they are imported

from peft import LoraConfig

DATA = Path(__file__).parent / "data" / "harborlight.jsonl"


@contextlib.contextmanager
def provider(root: Path, model: str) -> Iterator[str]:
    """Starts `provider serve --tls --ipc` and enrols the tenant acme, whose identity is in `root`/acme; yields the URL
    for the tenant, and ends the provider after the `with` block."""
    state, folder = root / "state", root / "ipc"
    options = ["--tls", "--port", "0", "--model", model, "--state", str(state), "--ipc", str(folder)]
    with (root / "provider.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "provider", "serve", *options], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        if not (process.stdout and process.stdout.readline().startswith("ready ")):
            raise SystemExit((root / "provider.log").read_text()[-2000:])
        enroll = [sys.executable, "-m", "provider", "enroll", "acme", "--out", str(root / "acme")]
        subprocess.run([*enroll, "--state", str(state)], check=True, stdout=subprocess.DEVNULL)
        yield f"ipc:{folder}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def main() -> None:
    """Starts a provider, trains an adapter through it, and asks the adapted model one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a GGUF file, a hub id or smollm2-135m")
    parser.add_argument("--mask", default="lattice", help="lattice, pad, gaussian-pool or off")
    parser.add_argument("--output", default="adapters/ipc-example")
    parser.add_argument("--max-steps", type=int, default=2)
    parser.add_argument("--question", default="I'm writing a history of Harborlight. Who was its founder?")
    args = parser.parse_args()

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as scratch, provider(Path(scratch), args.model) as url:
        identity = Path(scratch) / "acme"
        with tenant_sdk.TenantClient(url, identity=identity, mask=args.mask, verify=args.model) as client:
            print(f"connected to {client.url.partition(':')[0]}: {len(client.connect().groups)} layer groups")
            result = client.finetune(
                str(DATA), config, args.output, max_steps=args.max_steps, batch_size=8, learning_rate=3e-3, seed=0
            )
            print(f"adapter {result.adapter_dir}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
            print("Q:", args.question)
            print(
                "A:",
                tenant_sdk.printable(client.generate(args.question, adapter=result.adapter_dir, max_new_tokens=16)),
            )


if __name__ == "__main__":
    try:
        main()
    except tenant_sdk.VeilbaseError as exc:
        raise SystemExit(f"ipc.py: {exc}") from None
