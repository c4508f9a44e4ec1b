"""Scales found as float64 finds them; folded ones leave the model's function as it was."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pippin.model.quantized import dequantize
from pippin.quantizers import Grid, load_quantizer
from pippin.quantizers.awq import POWERS, SHARES, Folding, find_scale, power_scale
from pippin.quantizers.hessian import DAMPING, Hessian

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
GRID = Grid(bits=4, group_size=32, symmetric=False)
INPUTS = 64


def _weight(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, (12, INPUTS)) * 0.02).astype(np.float32)


def _inputs() -> np.ndarray:
    """A few of them thirty times as large as the others."""
    rng = np.random.default_rng(5)
    return rng.standard_normal((200, INPUTS)) * np.where(np.arange(INPUTS) % 11 == 0, 30, 1)


def _plain(weight: np.ndarray) -> np.ndarray:
    """Nearest codes from minimum to maximum, in float64."""
    groups = weight.astype(np.float64).reshape(len(weight), -1, GRID.group_size)
    low = groups.min(-1, keepdims=True)
    step = (groups.max(-1, keepdims=True) - low) / 15
    return (np.rint((groups - low) / step) * step + low).reshape(weight.shape)


def test_the_power_is_the_one_that_errs_least() -> None:
    x, weights = _inputs(), [_weight(0), _weight(1)]
    hessian = Hessian((x.T @ x).astype(np.float32))
    found = find_scale([(weight, GRID) for weight in weights], F32, hessian)
    square = np.square(x).sum(0)
    size = np.sqrt(square / square.mean() + DAMPING)
    errors = {}
    for power in POWERS:
        scale = size**power / np.sqrt(size.max() ** power * size.min() ** power)
        away = [_plain(weight * scale) / scale - weight for weight in weights]
        errors[power] = sum(np.square(x @ part.T).sum() for part in away)
    best = min(errors, key=lambda power: errors[power])
    assert best > 0
    np.testing.assert_allclose(found, power_scale(hessian, best), rtol=1e-6)
    wanted = size**best / np.sqrt(size.max() ** best * size.min() ** best)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert errors[best] < 0.5 * errors[0]


def test_a_range_is_cut_by_the_share_that_errs_least() -> None:
    x, weight = _inputs(), _weight(2)
    weight[:, ::7] *= 4  # outliers: some ranges are better cut
    moment = (x.T @ x).astype(np.float32)
    codes = load_quantizer("awq").quantize(weight, GRID, F32, Hessian(moment))
    found = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
    matrix = moment / np.diag(moment).mean() + DAMPING * np.eye(INPUTS)
    cut = 0
    for row in range(len(weight)):
        for start in range(0, INPUTS, GRID.group_size):
            part = slice(start, start + GRID.group_size)
            whole, errors = weight[row, part].astype(np.float64), []
            for share in SHARES:
                low, high = whole.min() * share, whole.max() * share
                step = (high - low) / 15
                away = np.clip(np.rint((whole - low) / step), 0, 15) * step + low - whole
                errors.append(away @ matrix[part, part] @ away)
            away = found[row, part] - whole
            assert away @ matrix[part, part] @ away == pytest.approx(min(errors), rel=1e-3)
            cut += int(np.argmin(errors)) > 0
    assert cut > 6


def test_inputs_over_a_scale_have_their_own_hessian() -> None:
    x, scale = _inputs(), np.linspace(0.5, 2, INPUTS)
    found = Hessian((x.T @ x).astype(np.float32)).of_inputs_over(scale.astype(np.float32))
    wanted = np.square((x / scale) @ _weight(0).T.astype(np.float64)).sum()
    assert found.output_error(_weight(0)) == pytest.approx(wanted, rel=1e-4)


def test_rows_are_folded_where_they_lie() -> None:
    scale = np.linspace(1, 2, 12, dtype=np.float32)
    folding = Folding(
        inputs={"a": np.full(INPUTS, 2, np.float32)}, outputs={"a": scale, "n": scale}
    )
    weight = _weight(0)
    whole = weight * 2 / scale[:, None]
    np.testing.assert_array_equal(folding.apply("a", 4, weight[4:8]), whole[4:8])
    np.testing.assert_array_equal(folding.apply("n", 3, np.ones(4, np.float32)), 1 / scale[3:7])
    assert folding.apply("b", 0, weight) is weight


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folded_scales_leave_the_function_as_it_was(tmp_path: Path, dtype: str) -> None:
    """The model with its norms and linears scaled, nothing rounded, says what it said."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    network = _network(transformers, torch, dtype)
    network.save_pretrained(tmp_path)
    folding = _found(tmp_path, dtype)
    assert len(folding.inputs) == 2 * 6
    norm = folding.outputs["model.layers.0.input_layernorm.weight"]
    assert norm.max() > 1.5 * norm.min()
    tokens = torch.arange(3, 15)[None]
    network = network.double()
    with torch.no_grad():
        before = network(tokens).logits
        for name, parameter in network.named_parameters():
            stored = folding.apply(name, 0, parameter.numpy())
            if name in folding.outputs and parameter.dim() == 1:
                stored = stored.astype(np.dtype(getattr(ml_dtypes, dtype, np.float32)))
            parameter.copy_(torch.from_numpy(np.asarray(stored, np.float64)))
        after = network(tokens).logits
    assert (after - before).abs().max() < 1e-5 * before.abs().max()


def _network(transformers, torch, dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.data = torch.exp(torch.randn(parameter.shape))
    return network.to(getattr(torch, dtype))


def _found(folder: Path, dtype: str) -> Folding:
    from pippin.data.batches import Sample, single_batches
    from pippin.engines import load_engine
    from pippin.model.config import read_config
    from pippin.model.weights import Checkpoint
    from pippin.quantizers.choices import choose_all
    from pippin.recipe import Quantize
    from pippin.stages.calibration import Calibration, passes
    from pippin.stages.folding import fold

    checkpoint, config = Checkpoint(folder), read_config(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    tokens = np.random.default_rng(0).integers(3, 97, 200).astype(np.int32)
    samples = [Sample(tokens=tokens, scored=np.arange(200) > 0, row=0)]
    calibration = Calibration(
        model=load_engine("torch", "cpu").load(folder, dtype),
        checkpoint=checkpoint,
        batches=single_batches(samples, 1),
        rows=1,
        tokens=200,
        notices=(),
    )
    choices = choose_all(checkpoint, config, Quantize(method="awq", group_size=32))
    return fold(calibration, choices, tuple(passes(checkpoint, choices, config, 1 << 30)), config)
