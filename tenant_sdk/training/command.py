"""This module runs the command `tenant finetune`: it turns a recipe into a call of `TenantClient.finetune`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftType

from runtime.command_line import instead
from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.training.finetune import adapter_errors, default_peft_config
from tenant_sdk.training.recipe import Recipe, check_keys, is_pipe
from tenant_sdk.training.settings import FinetuneResult
from tenant_sdk.training.token_rows import parse_data
from tenant_sdk.training.trainers import check_report_to
from wire.errors import ConfigurationError


class Finetunes(Protocol):
    """Is what the command needs of a `TenantClient`."""

    @property
    def finetune(self) -> Callable[..., FinetuneResult]:
        """Trains an adapter; see `TenantClient.finetune`."""


def check_recipe(recipe: Recipe) -> None:
    """Checks what `tenant_sdk.training.recipe.check_recipe_early` cannot check without torch: the adapter's settings,
    and rules for both data sets together. Does not read data from a pipe, which can be read only once.

    Raises:
        DatasetError, ConfigurationError: see `TenantClient.finetune`.
    """
    check_trainable(peft_config_of(recipe))
    options = recipe.options()
    check_report_to(options.report_to)
    if recipe.data is not None and not is_pipe(recipe.data):
        parse_data(recipe.data, options.eval_data, options.seed)


def finetune_command(recipe: Recipe, client: Finetunes, echo: Callable[[str], object]) -> None:
    """Trains as a recipe says, and prints the adapter's folder, losses, tokens, traffic and time.

    Args:
        recipe: the recipe, with a data set and an output folder.
        client: a connected client.
        echo: prints a text.
    """
    result = client.finetune(recipe.data, peft_config_of(recipe), str(recipe.output_dir), **vars(recipe.options()))
    echo(_summary(result))


def _summary(result: FinetuneResult) -> str:
    lines = [f"adapter {result.adapter_dir}", f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"]
    if result.evaluations:
        first, last = result.evaluations[0], result.evaluations[-1]
        best = min(result.evaluations, key=lambda each: each.loss)
        lines.append(
            f"evaluation loss {first.loss:.4f} -> {last.loss:.4f}  least {best.loss:.4f} at step {best.step}  "
            f"adapter of step {result.adapter_step}"
        )
    # `seconds` leaves out what comes before: the command's start, the check of the provider, the reading of the data
    covered = ["hints", "model", "training"]
    covered += ["evaluations"] if result.evaluations else []
    covered += ["waits for the provider"] if result.num_waits else []
    lines.append(
        f"tokens {result.tokens}  up {result.bytes_up / 1e6:.0f} MB  down {result.bytes_down / 1e6:.0f} MB  "
        f"{result.seconds:.0f} s for {', '.join(covered[:-1])} and {covered[-1]}"
    )
    return "\n".join(lines)


def peft_config_of(recipe: Recipe) -> PeftConfig:
    """Returns PEFT's settings for a recipe: its `peft_config`, or LoRA on every linear layer, with its `rank`.

    Raises:
        ConfigurationError: the kind or a key is none of PEFT's, a value is not possible, or `rank` does not go with it.
    """
    settings = dict(recipe.peft_config or {})
    name = str(settings.pop("peft_type", "LORA"))
    if name not in PeftType.__members__:
        advice = instead(name, PeftType.__members__, "docs/peft.md")
        raise ConfigurationError(f"peft_config: {ascii(name)[:60]} is no peft_type: {advice}")
    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[name]]
    keys = [field.name for field in dataclasses.fields(kind)]
    check_keys("peft_config: ", settings, keys, f"PEFT's documentation of {kind.__name__}")
    if recipe.rank is not None:
        if kind is not LoraConfig:
            raise ConfigurationError(f"rank (--rank) is LoRA's, and peft_config names {name}")
        settings |= {"r": recipe.rank, "lora_alpha": 2 * recipe.rank}
    if kind is LoraConfig:
        stock = default_peft_config()
        settings = {"r": stock.r, "lora_alpha": stock.lora_alpha, "target_modules": stock.target_modules} | settings
    with adapter_errors():
        return kind(**{"task_type": "CAUSAL_LM", **settings})  # type: ignore[no-any-return]
