"""Probes of the engine's own work on a small model: a train step, decoding, MJX; jax-mps' list."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from pippin.check import Case, NotThere
from pippin.check.families import Family
from pippin.engines import Sampling
from pippin.engines.jax.decoder import How, Net
from pippin.engines.jax.device import pick_device
from pippin.engines.jax.fuji import fuji_spec
from pippin.engines.jax.fuji_run import draw_params
from pippin.engines.jax.generate import generate
from pippin.engines.jax.optimizer import Adam, first_masters
from pippin.engines.jax.probes.bench import Bench, gap, unequal
from pippin.engines.jax.probes.mps_operators import OPERATORS
from pippin.engines.jax.products import Codes
from pippin.engines.jax.trainer import Frozen, Rule, train_step
from pippin.recipe import Train

SPEC = fuji_spec("test")
OPERATOR = re.compile(r'(?:^\s*|= )"?(?:stablehlo|chlo)\.([a-z_0-9]+)', re.MULTILINE)
BODIES = """<mujoco><option timestep="0.005"/><worldbody><geom type="plane" size="5 5 .1"/>
<body pos="0 0 1"><freejoint/><geom type="sphere" size=".1" mass="1"/></body>
<body pos="1 0 1"><joint type="hinge" axis="0 1 0"/>
<geom type="capsule" fromto="0 0 0 0 0 -.5" size=".03" mass="1"/></body></worldbody></mujoco>"""


def trained(bench: Bench, dtype: str) -> Iterator[Case]:
    """One LoRA update with and without remat, beside the CPU's in float32."""
    wanted = _update(pick_device("cpu"), "float32", How())
    for remat in (False, True):
        found = _update(bench.device, dtype, How(remat=remat))
        name = "remat, " if remat else ""
        yield f"{name}loss", gap(found[1], wanted[1])
        yield f"{name}gradient norm", gap(found[2], wanted[2])


def decoded(bench: Bench, dtype: str) -> Iterator[Case]:
    """Greedy tokens of the compiled loop, beside the CPU's of the same dtype."""
    prompts = [np.arange(5, 5 + n, dtype=np.int32) for n in (3, 9)]

    def decode(device: jax.Device) -> np.ndarray:
        net = Net(draw_params(SPEC, dtype, device), {})
        return np.array(list(generate(SPEC, net, prompts, Sampling(max_tokens=8))), np.int32)

    yield "tokens", unequal(decode(bench.device), decode(pick_device("cpu")))


def physics(bench: Bench, dtype: str) -> Iterator[Case]:
    """100 compiled steps of MuJoCo's MJX beside MuJoCo's own C step."""
    if importlib.util.find_spec("mujoco") is None or importlib.util.find_spec("mujoco.mjx") is None:
        raise NotThere("mujoco-mjx is not installed: pip install 'pippin[physics]'")
    import mujoco
    from mujoco import mjx

    plain: Any = mujoco  # its names come from a compiled module
    model = plain.MjModel.from_xml_string(BODIES)
    data = plain.MjData(model)
    data.qpos[7] = 0.7
    plain.mj_forward(model, data)
    there = mjx.put_model(model, device=bench.device)
    state = mjx.put_data(model, data, device=bench.device)
    step, worst = jax.jit(mjx.step), 0.0
    for _ in range(100):
        state = step(there, state)
        plain.mj_step(model, data)
        worst = max(worst, float(np.abs(np.asarray(state.qpos) - data.qpos).max()))
    yield "positions", worst


def listed(bench: Bench, dtype: str) -> Iterator[Case]:
    """Operators of the compiled train step, also over codes, that jax-mps lacks: none."""
    packed, scales = jnp.zeros((4, 176, 8), jnp.uint32), jnp.ones((4, 176, 2), jnp.bfloat16)
    for how in (How(), How(remat=True, dropout=0.1)):
        rule, args = _step_arguments(pick_device("cpu"), dtype, how)
        if how.remat:
            args[1].params["layers"]["mlp.up_proj.weight"] = Codes(packed, scales, scales)
        traced = export.export(jax.jit(lambda *a, rule=rule: train_step(rule, *a)))(*args)
        found = set(OPERATOR.findall(traced.mlir_module()))
        missing = sorted(found - OPERATORS)
        yield f"{how}: {', '.join(missing) or f'all of {len(found)}'}", float(len(missing))


def _update(device: jax.Device, dtype: str, how: How) -> Any:
    rule, args = _step_arguments(device, dtype, how)
    return train_step(rule, *args)


def _step_arguments(device: jax.Device, dtype: str, how: How) -> tuple[Rule, tuple[Any, ...]]:
    """A small model with a live adapter on two linears, and two packed rows."""
    adam = Adam.of(Train())
    rule = Rule(spec=SPEC, how=how, adam=adam, full=False, dtype=dtype)
    rng, layers = np.random.default_rng(4), SPEC.num_layers

    def pair(inputs: int, outputs: int) -> dict[str, Any]:
        sides = {"A": (layers, 4, inputs), "B": (layers, outputs, 4)}
        return {side: rng.normal(0, 0.1, s).astype(np.float32) for side, s in sides.items()}

    shapes = SPEC.shapes()
    first = {n: pair(*shapes[f"{n}.weight"][::-1]) for n in ("self_attn.v_proj", "mlp.down_proj")}
    scales = dict.fromkeys(first, np.ones(layers, np.float32))
    params = draw_params(SPEC, dtype, device)
    arrays = {
        "tokens": rng.integers(0, SPEC.vocab_size, (1, 2, 48)).astype(np.int32),
        "positions": np.tile(np.arange(24, dtype=np.int32), 4).reshape(1, 2, 48),
        "segments": np.repeat([1, 2, 1, 2], 24).reshape(1, 2, 48).astype(np.int32),
        "index": np.resize(np.arange(0, 90, 2), 512)[None].astype(np.int32),
        "targets": rng.integers(0, SPEC.vocab_size, (1, 512)).astype(np.int32),
        "count": np.array([45], np.int32),
    }
    put: Any = jax.device_put((first, scales, arrays), device)
    key = jax.random.key(0)
    figures = jnp.float32(45), jnp.float32(1e-3), jnp.int32(1)
    return rule, (first_masters(adam, put[0]), Frozen(params, put[1]), put[2], key, *figures)


FAMILIES = (
    Family(name="work.train step", measure=trained, dtypes=("float32", "bfloat16")),
    Family(name="work.decoding", measure=decoded, dtypes=("float32",), tolerance=0),
    Family(name="work.MJX", measure=physics, dtypes=("float32",), tolerance=1e-5),
    Family(name="work.jax-mps list", measure=listed, dtypes=("float32", "bfloat16"), tolerance=0),
)
