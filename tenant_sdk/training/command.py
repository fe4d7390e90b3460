"""This module runs the command `tenant finetune`: it turns a recipe into a call of `TenantClient.finetune`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftType

from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.training.dataset import source_of
from tenant_sdk.training.finetune import adapter_errors, default_peft_config
from tenant_sdk.training.recipe import Recipe, check_keys, check_peft_type, check_same_run, is_pipe
from tenant_sdk.training.run_identity import RunIdentity, adapter_part, data_part, texts
from tenant_sdk.training.settings import FinetuneResult
from tenant_sdk.training.token_rows import check_kind, parse_data
from tenant_sdk.training.trainers import check_report_to
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from tenant_sdk.plan_file import Bill


_PART, _MOST_AVERAGED = 10, 20
"""Which part of a run's steps, at each of its ends, the summary takes the mean of, and how many steps at most."""


class Finetunes(Protocol):
    """Is what the command needs of a `TenantClient`."""

    @property
    def finetune(self) -> Callable[..., FinetuneResult]:
        """Trains an adapter; see `TenantClient.finetune`."""


def check_recipe(recipe: Recipe, is_run: bool = True) -> None:
    """Checks what `tenant_sdk.training.recipe.check_recipe_early` cannot check without torch: the adapter's settings,
    and rules for both data sets together. Does not read data from a pipe, which can be read only once.

    Args:
        recipe: a recipe.
        is_run: whether the recipe is to be run, and not only planned.

    Raises:
        DatasetError, ConfigurationError: see `TenantClient.finetune`.
    """
    peft_config, options = peft_config_of(recipe), recipe.options()
    check_trainable(peft_config)
    check_report_to(options.report_to)
    settings = peft_config.to_dict()
    identity = RunIdentity(adapter_part(settings), adapter=texts(settings))
    if recipe.data is not None and not is_pipe(recipe.data):
        parsed = parse_data(recipe.data, options.eval_data, options.seed)
        check_kind(parsed, peft_config)
        rows, eval_rows = ([*map(source_of, each)] for each in (parsed.rows, parsed.eval_rows))
        identity.parts.update(data_part(rows, eval_rows))
    if is_run:
        check_same_run(recipe, identity)


def finetune_command(recipe: Recipe, client: Finetunes, echo: Callable[[str], object]) -> None:
    """Trains as a recipe says, and prints the adapter's folder, losses, tokens, traffic and time.

    Args:
        recipe: the recipe, with a data set and an output folder.
        client: a connected client.
        echo: prints a text.
    """
    result = client.finetune(
        recipe.data, peft_config_of(recipe), str(recipe.output_dir), plan=recipe.plan, **recipe.given()
    )
    echo(_summary(result))


class Plans(Protocol):
    """Is what the command `tenant plan` needs of a `TenantClient`."""

    @property
    def plan(self) -> Callable[..., Bill]:
        """Plans a run; see `TenantClient.plan`."""


def plan_command(
    recipe: Recipe, client: Plans, echo: Callable[[str], object], *, out: Path | None, as_json: bool, per_gb: float,
    per_hour: float,
) -> None:  # fmt: skip
    """Prints what a recipe's run will cost, and writes it into a file if one is named.

    Args:
        recipe: the recipe, with a data set.
        client: a connected client.
        echo: prints a text.
        out: the file, or None.
        as_json: whether JSON is printed in place of a table.
        per_gb, per_hour: prices; 0 for none.
    """
    bill = client.plan(recipe.data, peft_config_of(recipe), **recipe.given())
    price = bill.price(per_gb, per_hour)
    if as_json:
        echo(json.dumps({**json.loads(bill.to_json()), "price": price}, indent=1))
    else:
        echo(str(bill))
        if per_gb or per_hour:
            parts = f"{bill.num_bytes / 1e9:.3g} GB at {per_gb:g}, {(bill.seconds or 0) / 3600:.3g} h at {per_hour:g}"
            echo(f"price    {price:.4g} ({parts})")
    if out is not None:  # last, so that what was worked out is shown even where it cannot be written
        bill.save(out)


def _summary(result: FinetuneResult) -> str:
    lines = [f"adapter {result.adapter_dir}", f"loss {_trend(result.losses)}"]
    if result.evaluations:
        best = min(result.evaluations, key=lambda each: each.loss)
        least = f"  least {best.loss:.4f}" if len(result.evaluations) > 1 else ""
        lines.append(
            f"evaluation loss {_change([each.loss for each in result.evaluations])}{least} at step {best.step}  "
            f"adapter of step {result.adapter_step}"
        )
    # `seconds` leaves out what comes before: the command's start, the check of the provider, the reading of the data
    covered = ["hints", "model", "training"] if result.hint_bytes else ["model", "training"]
    covered += ["evaluations"] if result.evaluations else []
    covered += ["waits for the provider"] if result.num_waits else []
    hints = f", of it hints {_size(result.hint_bytes)}" if result.hint_bytes else ""
    lines.append(
        f"tokens {result.tokens}  {_size(result.bytes_up)} sent, {_size(result.bytes_down)} received{hints}  "
        f"{result.seconds:.0f} s for {', '.join(covered[:-1])} and {covered[-1]}"
    )
    return "\n".join(lines)


def _trend(losses: Sequence[float]) -> str:
    """Returns how the losses of a run's steps changed, by means of the first and the last ones: a single batch may lie
    above another by chance."""
    if len(losses) == 1:
        return f"{losses[0]:.4f}"
    num = min(max(len(losses) // _PART, 1), _MOST_AVERAGED)
    ends = _change([fmean(losses[:num]), fmean(losses[-num:])])
    return f"{ends} ({f'means of the first and the last {num} steps' if num > 1 else 'the first and the last step'})"


def _change(losses: Sequence[float]) -> str:
    """Returns the first and the last loss, or the only one."""
    first, last = losses[0], losses[-1]
    return f"{first:.4f} -> {last:.4f}" if len(losses) > 1 else f"{last:.4f}"


def _size(num_bytes: int) -> str:
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def peft_config_of(recipe: Recipe) -> PeftConfig:
    """Returns PEFT's settings for a recipe: its `peft_config`, or LoRA on every linear layer, with its `rank`.

    Raises:
        ConfigurationError: the kind or a key is none of PEFT's, a value is not possible, or `rank` does not go with it.
    """
    settings = dict(recipe.peft_config or {})
    name = str(settings.pop("peft_type", "LORA"))
    check_peft_type(name, PeftType.__members__)
    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[name]]
    keys = [field.name for field in dataclasses.fields(kind)]
    check_keys("peft_config: ", settings, keys, f"PEFT's documentation of {kind.__name__}")
    if recipe.rank is not None:
        if kind is not LoraConfig:
            raise ConfigurationError(f"rank (--rank) is LoRA's, and peft_config names {name}")
        if "r" in settings:
            raise ConfigurationError("rank and r of peft_config say the same: leave one of them out")
        settings = {"r": recipe.rank, "lora_alpha": 2 * recipe.rank} | settings
    if kind is LoraConfig:
        stock = default_peft_config()
        settings = {"r": stock.r, "lora_alpha": stock.lora_alpha, "target_modules": stock.target_modules} | settings
    with adapter_errors():
        return kind(**{"task_type": "CAUSAL_LM", **settings})  # type: ignore[no-any-return]
