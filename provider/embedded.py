"""Serves a model inside the tenant's own process, without a network and therefore without a privacy boundary."""

from __future__ import annotations

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import WeightsKind, serve_model
from wire.loading import quiet_transformers


def serve_in_process(
    model: str, weights: WeightsKind = "int8", base_layers: str | None = None, num_shards: int = 1
) -> ServedModel:
    """Loads a model and serves it to this process.

    Args:
        model: name, path or hub id, as for `provider serve --model`.
        weights: `int8` or `native`, as for `--weights`.
        base_layers: patterns of the names of layers to serve, as for `--base-layers`; None serves all layers.
        num_shards: the number of processes that compute, as for `--shards`; with 1, this process computes.

    Returns:
        The served model, to which the tenant's code can send calls at once. With several shards, `close` ends their
        processes.

    Raises:
        ConfigurationError: the model is unknown, it has no layer to serve, or there are more shards than layer groups.
    """
    with quiet_transformers():  # This restores the tenant's own log level and progress bars at its end.
        served = serve_model(load(resolve(model)), weights, base_layers)
    if num_shards == 1:
        return ServedModel(served)
    from provider.shards.in_process import ShardedModel

    return ShardedModel(served, num_shards)
