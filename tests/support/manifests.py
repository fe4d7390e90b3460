"""Makes the content of a valid manifest, which tests then change."""

from __future__ import annotations

import math
from typing import Any

from wire.limits import MAX_BUNDLE_BYTES

Q_PROJ = "model.layers.0.self_attn.q_proj"
"""The name of a layer in the manifest."""
DIGEST = "0123456789abcdef" * 4
"""A string with the form of a digest."""


def shape(in_features: int, out_features: int) -> dict[str, Any]:
    """Returns the entries of a manifest for the weight of a group or layer."""
    return {
        "in_features": in_features,
        "out_features": out_features,
        "max_column_norm": 127 * math.sqrt(in_features),
        "max_row_norm": 127 * math.sqrt(out_features),
        "digest": DIGEST,
    }


def layer(name: str, in_features: int, out_features: int) -> dict[str, Any]:
    """Returns the entry of a manifest for a linear layer."""
    return {"name": name, "kind": "linear", "bias": True, **shape(in_features, out_features)}


def valid() -> dict[str, Any]:
    """Returns a manifest of two groups."""
    return {
        "protocol": 2,
        "model_id": "org/model-7B",
        "config": {"model_type": "llama", "nested": {"a": [1, None, 0.5]}},
        "weights": "int8",
        "arithmetic": ["ring", "float"],
        "groups": [
            {
                "id": 0,
                "name": "model.layers.0.self_attn.q_proj+k_proj",
                "layers": [layer(Q_PROJ, 8, 8), layer(Q_PROJ.replace("q_", "k_"), 8, 4)],
                **shape(8, 12),
            },
            {"id": 1, "name": "lm_head", "layers": [layer("lm_head", 8, 100)], **shape(8, 100)},
        ],
        "bundle": [
            {"name": "config.json", "size_bytes": 10, "sha256": DIGEST},
            {"name": "model.safetensors", "size_bytes": MAX_BUNDLE_BYTES, "sha256": DIGEST},
        ],
        "bundle_digest": DIGEST,
        "limits": {"max_rows": 100, "max_tensor_bytes": 4096, "max_in_flight_bytes": 8192},
        "recording": False,
    }
