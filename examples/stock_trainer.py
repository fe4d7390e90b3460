"""Fine-tunes with transformers' own Trainer: stock tools can use a model of `load_model()` without changes.

    python examples/stock_trainer.py                                            # a provider inside this process
    python examples/stock_trainer.py --url grpcs://127.0.0.1:8443 --identity acme --verify smollm2-135m  # elsewhere

`TenantClient.finetune` does more: it checks the data set, resumes a failed run, and writes the adapter folder
completely or not at all. Without --verify, a value that is NaN or infinite does not stop the Trainer. The model then
warns once, and from this point on it sends and returns zeros, so that its calls do not show when the value occurred.
`check_run` raises the error at the end. The default mask, lattice, keeps 1.2 GB of hints for SmolLM2-135M in
~/.cache/veilbase; see docs/masks.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tenant_sdk

tenant_sdk.tune()  # first: torch and grpc read the variables that it sets once, when they are imported

from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

DATA = Path(__file__).parent / "data" / "harborlight.jsonl"


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """Returns the token ids of a conversation, with labels on the last answer only."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return {"input_ids": whole, "labels": [-100] * len(prompt) + whole[len(prompt) :]}


def main() -> None:
    """Trains and saves a LoRA adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="inproc:smollm2-135m")
    parser.add_argument("--identity", help="folder made by `provider enroll`")
    parser.add_argument("--mask", default="lattice", help="lattice, pad, gaussian-pool or off")
    parser.add_argument("--verify", help="checkpoint you trust: a folder, a GGUF file, a hub id or smollm2-135m")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--output", default="adapters/harborlight-stock")
    args = parser.parse_args()

    set_seed(0)
    with tenant_sdk.TenantClient(args.url, identity=args.identity, mask=args.mask, verify=args.verify) as client:
        tokenizer = client.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        lines = DATA.read_text(encoding="utf-8").splitlines()
        rows = [encode(tokenizer, json.loads(line)["messages"]) for line in lines]
        config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(client.load_model(), config)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=f"{args.output}.trainer",
                max_steps=args.max_steps,
                per_device_train_batch_size=8,
                learning_rate=3e-3,
                warmup_steps=0,  # the first step of a stock warm-up trains nothing, and costs as much as any other
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                dataloader_num_workers=0,  # a worker would be forked after the connection is open
                dataloader_pin_memory=False,
            ),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
        )
        client.fetch_hints(backward=True)  # with a progress bar; otherwise layers fetch hints at first use
        trainer.train()
        tenant_sdk.check_run(model)
        # False: otherwise PEFT would ask a hub whether the base model's vocabulary was changed
        model.save_pretrained(args.output, save_embedding_layers=False)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"adapter {args.output}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    try:
        main()
    except tenant_sdk.VeilbaseError as exc:
        raise SystemExit(f"stock_trainer.py: {exc}") from None
