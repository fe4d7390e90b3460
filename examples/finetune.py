"""Fine-tune a LoRA adapter through a provider and ask it something.

    python examples/finetune.py                                            # a provider inside this process
    python examples/finetune.py --url grpcs://127.0.0.1:8443 --identity acme/   # one across the network

The second form needs a provider that serves and an identity: see examples/two_terminals.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

# tenant_sdk comes first: it sets how long OpenMP's threads spin, which is read once, when torch is loaded.
from tenant_sdk import TenantClient

# isort: split
from peft import LoraConfig

DATA = Path(__file__).parent / "data" / "harborlight.jsonl"


def main() -> None:
    """Trains, then answers one question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="inproc:smollm2-135m")
    parser.add_argument("--identity", help="folder made by `provider enroll`")
    parser.add_argument("--data", default=str(DATA))
    parser.add_argument("--output", default="adapters/harborlight")
    parser.add_argument("--max-steps", type=int, default=28)
    parser.add_argument("--question", default="I'm writing a history of Harborlight. Who was its founder?")
    args = parser.parse_args()

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with TenantClient(args.url, identity=args.identity) as client:
        result = client.finetune(
            args.data, config, args.output, max_steps=args.max_steps, batch_size=8, learning_rate=2e-3, seed=0
        )
        print(f"adapter {result.adapter_dir}: loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")
        print(f"{result.tokens} tokens, {result.bytes_up} bytes up, {result.bytes_down} down, {result.seconds:.1f} s")
        print("Q:", args.question)
        print("A:", client.generate(args.question, adapter=result.adapter_dir, max_new_tokens=32))


if __name__ == "__main__":
    main()
