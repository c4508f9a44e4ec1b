"""Linears in codes: kernels compute the dense weight's product, forward and backward."""

import numpy as np
import pytest
import torch
from tests.targets.tiny_quantized import CHANNEL, SHAPE, write_quantized
from torch.nn import functional

from pippin.engines import Sampling, load_engine
from pippin.engines.torch import packed
from pippin.engines.torch.lora import LoraLinear
from pippin.engines.torch.packed import Int4Linear, Int8Linear, PackedLinear
from pippin.model.adapter import Base, adapted_linears, new_adapter, save_adapter
from pippin.model.quantized import dequantize
from pippin.model.weights import Checkpoint
from pippin.quantizers import Codes, Grid
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.torch
INT4 = Grid(bits=4, group_size=32, symmetric=False)


def codes(bits, shape, groups, symmetric, seed=0):
    """Random codes; scales and biases are bfloat16 numbers, as a quantized folder has them."""
    rng = np.random.default_rng(seed)
    scales = torch.from_numpy(rng.uniform(0.01, 0.02, (shape[0], groups))).bfloat16().float()
    biases = -(2 ** (bits - 1)) * scales
    if not symmetric:
        biases = (biases * torch.from_numpy(rng.uniform(0.5, 1.5, scales.shape))).bfloat16().float()
    values = rng.integers(0, 2**bits, shape).astype(np.uint8)
    return Codes(codes_OI=values, scales_OG=scales.numpy(), biases_OG=biases.numpy())


def made(kind, shape=(128, 192), symmetric=True, bias=False):
    bits, groups = (4, shape[1] // 32) if kind is Int4Linear else (8, 1)
    stored = codes(bits, shape, groups, symmetric)
    exact = dequantize(stored.codes_OI, stored.scales_OG, stored.biases_OG)
    bias = torch.linspace(-1, 1, shape[0], dtype=torch.bfloat16) if bias else None
    return kind(stored, bias), torch.from_numpy(exact).double(), bias


KINDS = [(Int4Linear, True), (Int4Linear, False), (Int8Linear, True)]


@pytest.mark.parametrize("piece", [packed.PIECE, 1])
@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_dense_is_the_stored_weight_rounded_once(kind, symmetric, piece, monkeypatch):
    monkeypatch.setattr(packed, "PIECE", piece)
    linear, exact, _ = made(kind, symmetric=symmetric)
    assert torch.equal(linear.dense(), exact.float().bfloat16())


@pytest.mark.parametrize("tokens", [1, 3, packed.FEW, packed.FEW + 1, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "symmetric"), KINDS)
def test_products_are_those_of_the_exact_weight(kind, symmetric, bias, tokens):
    linear, exact, offset = made(kind, symmetric=symmetric, bias=bias)
    x = torch.randn(2, tokens, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = functional.linear(x.double(), exact, None if offset is None else offset.double())
    error = (linear(x).double() - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-2


def test_gradients_pass_through():
    linear, exact, _ = made(Int4Linear)
    x = torch.randn(1, 3, 192, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(1, 3, 128, dtype=torch.bfloat16)
    linear(x).backward(grad)
    wanted = grad.double() @ exact
    assert (x.grad.double() - wanted).abs().max() / wanted.abs().max() < 1e-2


def test_a_processor_that_packs_otherwise_is_not_guessed_at(monkeypatch):
    def other(values, tiles):
        return torch.zeros(values.shape[0], values.shape[1] // 2, dtype=torch.uint8)

    packed.kernel_order.cache_clear()
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", other)
    assert packed.kernel_order() is None
    assert packed.kernel_for(INT4, (64, 64)) is None
    packed.kernel_order.cache_clear()


@pytest.mark.parametrize(
    ("grid", "shape"),
    [
        (Grid(bits=3, group_size=32, symmetric=False), (64, 64)),
        (Grid(bits=8, group_size=32, symmetric=True), (64, 64)),
        (INT4, (96, 64)),
    ],
)
def test_what_no_kernel_takes_is_dequantized(grid, shape):
    assert packed.kernel_for(grid, shape) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with its linears in 4 bits and its embedding in 8."""
    import transformers

    path = tmp_path_factory.mktemp("quantized")
    shape = {"intermediate_size": 128, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**{**SHAPE, **shape})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = transformers.LlamaForCausalLM(config).state_dict()
    del state["lm_head.weight"]
    arrays = {name: value.numpy() for name, value in state.items()}
    write_quantized(
        path, config.to_dict(), arrays, lambda name: CHANNEL if "embed" in name else INT4
    )
    return path


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def coded_engine(request, engine):
    return engine if request.param == "cpu" else load_engine("torch", "cuda")


def test_a_folder_speaks_as_its_dense_model_does(folder, engine, coded_engine):
    dense, coded = engine.load(folder, "float32"), coded_engine.load(folder, "bfloat16")
    layers = [m for m in coded.network.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 7 * coded.network.config.num_hidden_layers
    assert not any(isinstance(m, PackedLinear) for m in dense.network.modules())
    tokens = np.arange(3, 27, dtype=np.int32)[None]
    np.testing.assert_allclose(coded.logprobs(tokens), dense.logprobs(tokens), atol=0.15)
    # The first token follows a dense product, the next ones the codes'.
    asked = np.arange(3, 12, dtype=np.int32)
    said = [token for (token,) in coded.generate([asked], Sampling(max_tokens=8))]
    best = dense.topk(np.array([*asked, *said], np.int32)[None], 1, None).logprobs_BTK[0, :, 0]
    own = dense.logprobs(np.array([*asked, *said], np.int32)[None])[0, len(asked) - 1 :]
    np.testing.assert_allclose(own, best[len(asked) - 1 : -1], atol=0.15)


def test_codes_take_the_memory_of_codes(folder, coded_engine):
    network = coded_engine.load(folder, "bfloat16").network
    linears = [m for m in network.modules() if isinstance(m, PackedLinear)]
    held = sum(b.numel() * b.element_size() for m in linears for b in m.buffers())
    weights = sum(m.in_features * m.out_features for m in linears)
    assert 8 * held / weights <= 4 + 4 * 16 / 32  # scales and biases, for us and for the kernel


def test_an_adapter_trains_on_codes(folder, engine, coded_engine, pack, samples, tmp_path):
    lora = Lora(rank=4, alpha=8, targets=("q_proj", "down_proj"))
    first = new_adapter(adapted_linears(Checkpoint(folder), lora), lora, seed=0)
    rows = pack([samples])
    losses = {}
    for side, dtype in ((engine, "float32"), (coded_engine, "bfloat16")):
        trainer = side.load(folder, dtype).trainer(Train(), lora, first, 0)
        found = [trainer.step([rows], 1e-2) for _ in range(8)]
        losses[dtype] = [step.loss_sum / step.tokens for step in found]
    assert any(
        isinstance(m.base, PackedLinear)
        for m in trainer.network.modules()
        if isinstance(m, LoraLinear)
    )
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.1
    save_adapter(tmp_path, lora, trainer.weights(), Base(name="x", digest=""))
    again = coded_engine.load(folder, "bfloat16", tmp_path)
    tokens = samples[0][None]
    wanted = engine.load(folder, "float32", tmp_path).logprobs(tokens)
    np.testing.assert_allclose(again.logprobs(tokens), wanted, atol=0.15)


def test_moments_of_codes_are_those_of_dense_weights(folder, engine, pack, samples):
    """By float32, which dequantizes; an adapter's base may keep its codes while it calibrates."""
    coded, dense = engine.load(folder, "bfloat16"), engine.load(folder, "float32")
    assert any(isinstance(m, PackedLinear) for m in coded.network.modules())
    batch = [pack([samples[:2]])]
    assert coded.loss_moments(batch).keys() == dense.loss_moments(batch).keys()
    found, wanted = (model.input_moments(batch) for model in (coded, dense))
    assert found.keys() == wanted.keys()
    for name, moment in wanted.items():
        atol = 0.1 * float(np.abs(moment).max())
        np.testing.assert_allclose(found[name], moment, atol=atol, err_msg=name)
