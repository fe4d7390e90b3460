"""This module checks the options of extract_lora and recover_prompts before torch is loaded, which takes seconds: names
of adversaries, masks, models and tenants, and the folders of an adapter and of a recording.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

from attacks.seen.recording import tenants_of
from attacks.victim.names import MASKS, PRIVATE_MASKS, TINY_MODELS, check_model, masks_of
from runtime.command_line import instead
from wire.errors import ConfigurationError


def wanted_adversaries(names: str, known: Collection[str]) -> list[str]:
    """Returns the names of adversaries in a comma-separated list.

    Args:
        names: the list.
        known: the names that there are.

    Raises:
        ConfigurationError: a name is unknown, or there is none.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        advice = instead(unknown[0] if unknown else "", known, "--list")
        raise ConfigurationError(f"no adversary {', '.join(unknown)[:80] or repr(names)}: {advice}")
    return wanted


def check_options(options: argparse.Namespace, model: str, masks: str) -> None:
    """Checks the options that name a model, a mask, a folder or a tenant.

    Args:
        options: the parsed command line.
        model: the model's name, also where no option names it.
        masks: the masks that are evaluated where no option names them.

    Raises:
        ConfigurationError: there is no such thing, or options do not go together.
    """
    if options.view is not None:
        _check_recording(options)
    else:
        masks_of(options.masks or masks)
        if options.peft != "lora" and model not in TINY_MODELS:
            raise ConfigurationError("the full profile trains LoRA; --peft is for the tiny models")
    check_model(model)
    if options.adapter is not None and not (options.adapter / "adapter_config.json").is_file():
        raise ConfigurationError(f"expected a PEFT adapter folder, got {str(options.adapter)!r}")


def _check_recording(options: argparse.Namespace) -> None:
    if options.model is None or options.model in TINY_MODELS:
        raise ConfigurationError("--view needs --model: the folder or the name of the model that the recording is of")
    known = dict.fromkeys((*MASKS, *PRIVATE_MASKS))
    if options.masks is not None and options.masks not in known:
        raise ConfigurationError(f"with --view, --masks is one of {', '.join(known)}; got {options.masks!r}")
    there = tenants_of(options.view)
    if options.tenant is not None and options.tenant not in there:
        raise ConfigurationError(f"no tenant {options.tenant!r} in the recording: there are {', '.join(there)}")
    if options.adapter is not None and options.tenant is None and len(there) > 1:
        raise ConfigurationError(f"--adapter is one tenant's: choose --tenant out of {', '.join(there)}")
