"""A provider inside the tenant's process: no network, and no privacy boundary either."""

from __future__ import annotations

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import WeightsKind, serve_model
from wire.loading import quiet_transformers


def serve_in_process(model: str, weights: WeightsKind = "int8", base_layers: str | None = None) -> ServedModel:
    """Loads a model and serves it to this process.

    Args:
        model: as `provider serve --model`.
        weights: as `--weights`.
        base_layers: as `--base-layers`.

    Raises:
        ConfigurationError: an unknown model, or nothing to serve.
    """
    with quiet_transformers():  # the tenant's own log level and bars are as before when this returns
        return ServedModel(serve_model(load(resolve(model)), weights, base_layers))
