"""Fine-tunes a LoRA adapter through a provider, and asks the adapted model a question.

    python examples/finetune.py                                            # a provider inside this process
    python examples/finetune.py --url grpcs://127.0.0.1:8443 --identity acme --verify smollm2-135m  # elsewhere

The second form needs a running provider and an identity: see examples/two_terminals.md. --verify names your own copy of
the model, against which every reply is checked. The default mask, lattice, keeps 1.2 GB of hints for SmolLM2-135M in
~/.cache/veilbase; see docs/masks.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import tenant_sdk

tenant_sdk.tune()  # first: torch and grpc read the variables that it sets once, when they are imported

from peft import LoraConfig

DATA = Path(__file__).parent / "data" / "harborlight.jsonl"


def main() -> None:
    """Trains an adapter, then asks the adapted model one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="inproc:smollm2-135m")
    parser.add_argument("--identity", help="folder made by `provider enroll`")
    parser.add_argument("--mask", default="lattice", help="lattice, pad, gaussian-pool or off")
    parser.add_argument("--verify", help="checkpoint you trust: a folder, a GGUF file, a hub id or smollm2-135m")
    parser.add_argument("--data", default=str(DATA))
    parser.add_argument("--output", default="adapters/harborlight-example")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--question", default="I'm writing a history of Harborlight. Who was its founder?")
    args = parser.parse_args()

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tenant_sdk.TenantClient(args.url, identity=args.identity, mask=args.mask, verify=args.verify) as client:
        client.explain()
        result = client.finetune(
            args.data, config, args.output, max_steps=args.max_steps, batch_size=8, learning_rate=3e-3, seed=0
        )
        print(f"adapter {result.adapter_dir}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
        print(f"{result.tokens} tokens, {result.bytes_up} bytes up, {result.bytes_down} down", end=", ")
        print(f"{result.seconds:.1f} s for hints, model and training")
        print("Q:", args.question)
        print("A:", tenant_sdk.printable(client.generate(args.question, adapter=result.adapter_dir, max_new_tokens=32)))


if __name__ == "__main__":
    try:
        main()
    except tenant_sdk.VeilbaseError as exc:
        raise SystemExit(f"finetune.py: {exc}") from None
