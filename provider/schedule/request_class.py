"""Kinds of work."""

from __future__ import annotations

from enum import IntEnum


class RequestClass(IntEnum):
    """The most urgent first; the operator may forbid a tenant any of them."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2
