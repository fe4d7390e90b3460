"""This module decides where keys and values (KV) are kept and where attention over them is computed, if the tenant's
model is on a device such as a GPU.

KV of long requests may take more memory than the device has, and host memory is larger. With `kv_device="cpu"` all KV
is in host memory. Attention of a few rows, such as an answer's row, is computed there: it reads each number only once,
so on a host with enough cores, sending the numbers to the device would take longer. Attention of many rows, such as a
prompt's, is computed on the device, to which the KV of one request and layer is sent. The tests passed on one H100; no
time was measured there.

Source: "Symbiosis: Multi-Adapter Inference and Fine-Tuning" (2025), section 3.4, keeps KV on the host in this way.
"""

from __future__ import annotations

import torch

from wire.errors import ConfigurationError

DEVICE_ROWS = 32
"""From so many rows of a request on, attention is computed on the device. The number comes from the arithmetic in
docs/long-context.md: with so many rows, a host with 32 cores takes as long to compute the products as the link to the
device takes to send the KV."""


def kv_place(asked: str | None, model_device: torch.device) -> torch.device:
    """Returns the device for KV.

    Args:
        asked: "cpu" for host memory; None for the model's own device.
        model_device: the device of the model.

    Raises:
        ConfigurationError: another device was asked for.
    """
    if asked is None:
        return model_device
    if asked != "cpu":
        raise ConfigurationError(f'kv_device is None, the model\'s device, or "cpu", got {ascii(asked)[:40]}')
    return torch.device("cpu")


def attention_device(num_rows: int, rows_device: torch.device, kv_device: torch.device) -> torch.device:
    """Returns the device that computes the attention of one request's rows in a step.

    Args:
        num_rows: the number of these rows.
        rows_device: the device of the model.
        kv_device: the device of the request's KV.
    """
    return rows_device if num_rows >= DEVICE_ROWS else kv_device
