"""A provider inside the tenant's process: there is no network, and no privacy boundary either."""

from __future__ import annotations

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import WeightsKind, serve_model
from wire.loading import quiet_transformers


def serve_in_process(model: str, weights: WeightsKind = "int8", base_layers: str | None = None) -> ServedModel:
    """Loads a model and serves it to this process.

    Args:
        model: see `provider serve --model`.
        weights: see `--weights`.
        base_layers: see `--base-layers`.

    Raises:
        ConfigurationError: the model is unknown, or there is nothing to serve.
    """
    with quiet_transformers():  # The tenant's own log level and progress bars are as before when this returns.
        return ServedModel(serve_model(load(resolve(model)), weights, base_layers))
