"""A Hugging Face folder as one of mlx-lm's models: strict, one copy in memory."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx_lm.utils import dequantize_model, load_model

from pippin.engines.mlx.attention import accept_positions
from pippin.errors import ModelError, first_line
from pippin.model.config import read_raw, with_rope_keys


def load_network(folder: Path, dtype: mx.Dtype, remote_code: bool = False) -> nn.Module:
    """The folder's model, frozen, in evaluation mode, its weights in memory; see `map_network`."""
    network = map_network(folder, dtype, remote_code)
    mx.eval(network.parameters())
    return network


def map_network(folder: Path, dtype: mx.Dtype, remote_code: bool = False) -> nn.Module:
    """The same, its weights to be read when they are used for the first time.

    On a GPU quantized modules stay quantized, their scales and biases in `dtype` like any other
    tensor; on a CPU, where MLX multiplies codes without a BLAS, they become dense. Raises
    ModelError for a folder that mlx-lm cannot load, and for tensors that are missing, left over or
    of another shape.
    """
    config = with_rope_keys(read_raw(folder))
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(
            f"{folder} has no model*.safetensors file", "convert the weights to safetensors first"
        )
    try:
        network, _ = load_model(
            folder, lazy=True, strict=True, model_config=config, trust_remote_code=remote_code
        )
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder}: mlx-lm {mlx_lm.__version__} does not load it: {first_line(error)}",
            "set model.engine = torch, or choose a model whose architecture mlx-lm knows",
        ) from error
    _repair(network, config)
    accept_positions(network)
    network.set_dtype(dtype)
    if not keeps_codes():
        network = dequantize_model(network)
        network.set_dtype(dtype)  # small floats became bfloat16, in which they are exact
    network.freeze()
    network.eval()
    return network


def keeps_codes() -> bool:
    """Whether the device multiplies by codes faster than by the dense weight."""
    return mx.default_device().type != mx.DeviceType.cpu


def _repair(network: nn.Module, config: dict[str, Any]) -> None:
    """mlx-lm rounds Gemma 3's embedding scale to bfloat16 whatever the model's dtype is."""
    if config.get("model_type") == "gemma3_text":
        exact = config["hidden_size"] ** 0.5
        embed: Any = network["model"]["embed_tokens"]
        embed.__class__ = _scaled(type(embed), exact)


def _scaled(kind: Any, scale: float) -> type:
    """An embedding that undoes the rounding of the factor that follows it, in exact dtypes."""
    rounded = float(mx.array(scale, mx.bfloat16))

    class ScaledEmbedding(kind):
        def __call__(self, tokens: mx.array) -> mx.array:
            hidden = super().__call__(tokens)
            return hidden if hidden.dtype == mx.bfloat16 else hidden * (scale / rounded)

    return ScaledEmbedding
