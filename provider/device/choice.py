"""Chooses the device that computes a provider's products, and says in one line why an accelerator cannot be used.

Guarantees: a CUDA device is chosen only if its products passed a self-test (`wire.ring.product.is_exact_on`) and it has
room for the weights. Of real devices this was run on one H100.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from provider.device.weights import check_room
from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError
from wire.ring.product import is_exact_on

LEAST_FREE_BYTES = 1 << 30
"""The free memory, in bytes, that a device must have before weights are loaded: room for CUDA's own context, for
cuBLAS' workspaces and for the limbs of a batch."""
_LOGGER = logging.getLogger(__name__)


def choose(wanted: str, number: int = 0, groups: Sequence[ServedGroup] = ()) -> torch.device | None:
    """Chooses the device of one process that computes.

    Args:
        wanted: `auto`, `cpu`, `cuda` or `cuda:N`.
        number: the process's number among those of this provider. `auto` and `cuda` give process i the device i mod n
            of the n that the machine has.
        groups: the layer groups whose weights are to be moved there.

    Returns:
        The CUDA device, or None if the CPU computes.

    Raises:
        ConfigurationError: the operator asked for a CUDA device that cannot be used. With `auto`, the same text is
            logged, and the CPU computes; so the text says what a GPU would need, and gives no order.
    """
    if wanted == "cpu":
        return None
    try:
        device = find(wanted, number)
        _examine(device)
        check_room(groups, device)
    except ConfigurationError as exc:
        if wanted != "auto":
            raise
        _LOGGER.info("computing on the CPU; no GPU is used: %s", exc)
        return None
    _LOGGER.info("computing on %s, %s", device, torch.cuda.get_device_name(device))
    return device


def find(wanted: str, number: int = 0) -> torch.device:
    """Returns the CUDA device that `wanted` (`auto`, `cuda` or `cuda:N`) means, without testing it; see `choose`.

    Raises:
        ConfigurationError: there is no such device, or no driver for it.
    """
    if not torch.backends.cuda.is_built():
        raise ConfigurationError("this build of torch has no CUDA (a GPU would need torch's CUDA build)")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as exc:
        raise ConfigurationError(_why_no_cuda(str(exc))) from None  # the line says what the text of CUDA says
    count = torch.cuda.device_count()
    if not count:
        raise ConfigurationError("no CUDA device is visible to this process")
    _, _, index = wanted.partition(":")
    if index and int(index) >= count:
        raise ConfigurationError(f"no device {wanted}: this machine has {count}, counted from 0")
    return torch.device("cuda", int(index) if index else number % count)


def _why_no_cuda(text: str) -> str:
    if "too old" in text:
        return f"the NVIDIA driver is too old for CUDA {torch.version.cuda} (a GPU would need a newer one)"
    if "no NVIDIA driver" in text:
        return "this machine has no NVIDIA driver"
    return f"CUDA cannot be started: {first_line(text)}"


def _examine(device: torch.device) -> None:
    """Raises ConfigurationError if other processes leave a device too little memory, or if it fails or computes a wrong
    number."""
    try:
        free, total = torch.cuda.mem_get_info(device)
        if free < LEAST_FREE_BYTES:
            raise ConfigurationError(
                f"{device} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free, since other processes hold the rest: "
                f"{LEAST_FREE_BYTES / 1e9:.1f} GB would be needed"
            )
        is_exact = is_exact_on(device)
    except RuntimeError as exc:
        raise ConfigurationError(f"{device} cannot be used: {first_line(str(exc))}") from None
    if not is_exact:
        raise ConfigurationError(f"{device} failed the self-test of its int8 products")


def first_line(text: str) -> str:
    """Returns the first line of an error's text, cut to 200 characters for a log; "no reason given" if it is empty."""
    return (text.strip().splitlines() or ["no reason given"])[0][:200]
