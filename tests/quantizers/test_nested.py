"""Scales of scales: what they are multiples of, how near they come, and when a tensor has them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from tests.targets.tiny_quantized import SHAPE

from pippin.model.config import read_config
from pippin.model.names import module
from pippin.model.quantized import dequantize, layout
from pippin.model.weights import Spec
from pippin.quantizers import QUANTIZERS, Grid, load_quantizer, search
from pippin.quantizers.choices import Choice, choose_all, quantized_config
from pippin.quantizers.hessian import Hessian
from pippin.quantizers.nested import MOST, neighbours, nest, nested_grid
from pippin.recipe import Data, Model, Quantize, Recipe
from pippin.recipe_limits import contradictions

BF16 = np.dtype(ml_dtypes.bfloat16)
GROUPS = {"group_size": 32, "embed_group_size": 32}
K4 = Quantize(bits=4, scheme="k", embed_bits=6, embed_scheme="k", **GROUPS)


def weight(rows: int = 12, inputs: int = 512) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_t(4, (rows, inputs)) * 0.02).astype(np.float32)


@pytest.mark.parametrize("method", sorted(QUANTIZERS))
@pytest.mark.parametrize("bits", [4, 6])
def test_every_method_keeps_them_whole(method: str, bits: int) -> None:
    """Multiples of one power of two for eight groups, within the type's range, in bfloat16."""
    grid, weight_OI = nested_grid(bits), weight()
    rng = np.random.default_rng(1)
    inputs_NI = rng.standard_normal((600, 512)).astype(np.float32)
    hessian = Hessian(inputs_NI.T @ inputs_NI / 600)
    codes = load_quantizer(method).quantize(weight_OI, grid, BF16, hessian)
    found = codes.scales_OG.astype(np.float64), -codes.biases_OG.astype(np.float64)
    if grid.symmetric:
        np.testing.assert_array_equal(found[1], found[0] * 2 ** (bits - 1))
    for values_OG in found[:1] if grid.symmetric else found:
        groups_OUE = values_OG.reshape(12, 2, 8)
        step_OU1 = 2.0 ** np.ceil(np.log2(groups_OUE.max(-1, keepdims=True) / MOST[bits]))
        multiples_OUE = groups_OUE / step_OU1
        np.testing.assert_array_equal(multiples_OUE, np.rint(multiples_OUE))
        assert 0 <= multiples_OUE.min() <= multiples_OUE.max() <= MOST[bits]
    assert codes.scales_OG.min() > 0


@pytest.mark.parametrize("bits", MOST)
def test_they_are_the_nearest_and_stay_as_they_are(bits: int) -> None:
    rng = np.random.default_rng(2)
    plain = rng.uniform(0.01, 0.04, (3, 16)).astype(np.float32)
    grid = nested_grid(bits)
    once = nest((plain, -8 * plain), grid)
    twice = nest(once, grid)
    np.testing.assert_array_equal(once, twice)
    half_step = 0.5 * plain.max() * 2 / MOST[bits]
    assert np.abs(once[0] - plain).max() <= half_step


def test_a_group_above_zero_is_covered() -> None:
    grid, weight_OI = nested_grid(4), np.full((1, 256), 1.0, np.float32)
    weight_OI[0, ::2] = 2.0
    codes = load_quantizer("rtn").quantize(weight_OI, grid, BF16)
    assert set(codes.codes_OI[0].tolist()) == {8, 15}
    assert not codes.biases_OG.any()


def test_where_256_does_not_divide_plain_groups_take_their_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    config = read_config(tmp_path)
    widths = {"mlp.down_proj": 512, "mlp.up_proj": 288, "self_attn.q_proj": 40}
    tensors = {
        f"model.layers.0.{name}.weight": Spec(shape=(8, width), dtype=BF16)
        for name, width in widths.items()
    }
    tensors["model.embed_tokens.weight"] = Spec(shape=(8, 288), dtype=BF16)
    choices = choose_all(SimpleNamespace(tensors=tensors), config, K4)
    down, up, query, embedding = choices.values()
    assert down == Choice(grid=nested_grid(4))
    assert up.grid == Grid(bits=5, group_size=32, symmetric=True)
    assert up.why == "256 does not divide 288: codes of 5 bits in groups of 32"
    assert query.grid is None
    assert embedding.grid == Grid(bits=8, group_size=32, symmetric=True)
    (tmp_path / "config.json").write_text(json.dumps(quantized_config(config, choices, K4)))
    for name, choice in choices.items():
        assert choice.grid is None or layout(read_config(tmp_path), module(name)) == choice.grid


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"bits": 8}, "bits", "no K type has 8 bits"),
        ({"group_size": 64}, "group_size", "groups of 32"),
        ({"embed_bits": 8}, "embed_bits", "no K type has 8 bits"),
        ({"method": "best", "recover_tokens": 512}, "scheme", "neither tuned nor given"),
        ({"method": "best", "target_bits": 4.5}, "scheme", "neither tuned nor given"),
        ({"embed_bits": 16, "embed_group_size": 64}, None, ""),
    ],
)
def test_what_they_cannot_be_is_told_before_any_work(changes, key, message) -> None:
    model, data = Model(source="x"), Data(source="x")
    recipe = Recipe(model=model, data=data, quantize=replace(K4, **changes))
    found = [where[1] for where, text, _ in contradictions(recipe) if message in text]
    assert found[:1] == ([key] if key else [])


@pytest.mark.parametrize("bits", [2, 4, 5, 6])
def test_searched_ones_lose_little_to_plain_groups(bits: int) -> None:
    """Rounding scales to multiples alone loses up to 15 %; the neighbours make up for it."""
    weight_OI, grid = weight(64), nested_grid(bits)
    errors = []
    for tried in (grid, replace(grid, nested=False)):
        codes = load_quantizer("mse").quantize(weight_OI, tried, BF16)
        dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
        errors.append(np.linalg.norm(dense - weight_OI))
    assert errors[0] < 1.03 * errors[1]


def test_neighbours_are_those_of_the_nearest_not_of_the_best_so_far(monkeypatch) -> None:
    starts, tried = [], []

    def noted(grids, grid):
        starts.append((tuple(part.copy() for part in grids), grid))
        for one in neighbours(grids, grid):
            tried.append(tuple(part.copy() for part in one))
            yield one

    monkeypatch.setattr(search, "neighbours", noted)
    load_quantizer("mse").quantize(weight(), nested_grid(5), BF16)
    wanted = [grids for start in starts for grids in neighbours(*start)]
    np.testing.assert_array_equal(tried, wanted)
