"""A Fuji-shaped model of random weights: greedy tokens and logits on a device, then on the CPU.

Shape letters: T tokens, V vocabulary, D hidden.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pippin.engines import Sampling
from pippin.engines.jax.architecture import Spec
from pippin.engines.jax.decoder import Net, Params, Rows, head_weight, hidden_states, logits
from pippin.engines.jax.device import DTYPES, describe, peak_memory, pick_device
from pippin.engines.jax.fuji import fuji_spec
from pippin.engines.jax.generate import generate
from pippin.engines.jax.load import hold, top_shapes

PROMPT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FujiRun:
    """What was found. Differences are of logits; shares are of positions.

    `difference` and `agreement` compare the device with the same weights in float32 arithmetic on
    the CPU, `spread` is the standard deviation of those logits. `tokens_equal` compares the tokens
    of the cached loop with the CPU's own, `loop_equal` with the likeliest tokens of one pass.
    """

    size: str
    parameters: int
    device: str
    dtype: str
    tokens: tuple[int, ...]
    difference: float
    mean_difference: float
    spread: float
    agreement: float
    tokens_equal: float
    loop_equal: float
    device_seconds: float
    cpu_seconds: float
    peak_memory: int


def run_fuji(size: str, tokens: int, device: str = "auto", dtype: str = "bfloat16") -> FujiRun:
    """Draw the model, decode `tokens` greedily on the device, and compare with the CPU.

    Raises UsageError for an unknown size or a device that is not there.
    """
    spec, place, host = fuji_spec(size), pick_device(device), pick_device("cpu")
    host_params = draw_params(spec, dtype, host)
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, PROMPT).astype(np.int32)
    params = host_params if place == host else jax.device_put(host_params, place)
    start = time.perf_counter()
    decoded = _decode(spec, params, prompt, tokens)
    whole = np.concatenate([prompt, decoded])
    found = _logits(spec, params, whole)
    middle = time.perf_counter()
    own = decoded if place == host else _decode(spec, host_params, prompt, tokens)
    exact = _logits(spec, _in_float32(host_params), whole)
    end = time.perf_counter()
    gap = np.abs(found - exact)
    likeliest = found.argmax(1)[PROMPT - 1 : -1]
    return FujiRun(
        size=size,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(host_params)),
        device=describe(place),
        dtype=dtype,
        tokens=tuple(decoded.tolist()),
        difference=float(gap.max()),
        mean_difference=float(gap.mean()),
        spread=float(exact.std()),
        agreement=float((found.argmax(1) == exact.argmax(1)).mean()),
        tokens_equal=float((decoded == own).mean()),
        loop_equal=float((decoded == likeliest).mean()),
        device_seconds=round(middle - start, 1),
        cpu_seconds=round(end - middle, 1),
        peak_memory=peak_memory(place),
    )


def draw_params(spec: Spec, dtype: str, device: jax.Device) -> Params:
    """Weights of mean 0 and variance 1 / inputs, norms of 1; a layer at a time on the host."""
    rng = np.random.default_rng(1)

    def draw(shape: tuple[int, ...]) -> NDArray[Any]:
        if len(shape) == 1:
            return np.ones(shape, DTYPES[dtype])
        bound = (3.0 / shape[-1]) ** 0.5
        return ((rng.random(shape, np.float32) * 2 - 1) * bound).astype(DTYPES[dtype])

    def stack(shape: tuple[int, ...]) -> Array:
        whole = np.empty((spec.num_layers, *shape), DTYPES[dtype])
        for number in range(spec.num_layers):
            whole[number] = draw(shape)
        return hold(whole, device)

    top = {name: jax.device_put(draw(shape), device) for name, shape in top_shapes(spec).items()}
    return {**top, "layers": {name: stack(shape) for name, shape in spec.shapes().items()}}


def _decode(spec: Spec, params: Params, prompt: NDArray[np.int32], tokens: int) -> Any:
    steps = generate(spec, Net(params, {}), [prompt], Sampling(max_tokens=tokens))
    return np.array([step[0] for step in steps], np.int32)


def _logits(spec: Spec, params: Params, tokens_T: NDArray[np.int32]) -> NDArray[np.float32]:
    """(T, V) of one pass without a cache."""
    return np.asarray(_forward(spec, params, tokens_T[None]))


@partial(jax.jit, static_argnums=0)
def _forward(spec: Spec, params: Params, tokens_BT: Array) -> Array:
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    rows = Rows(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
    hidden_BTD = hidden_states(spec, Net(params, {}), rows)
    return logits(spec, head_weight(params), hidden_BTD[0])


def _in_float32(params: Params) -> Params:
    """Float32 at the entrance is float32 throughout: each layer's weights are widened in turn."""
    return {**params, "embed": params["embed"].astype(jnp.float32)}
