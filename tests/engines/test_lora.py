"""The adapter's layer equals its formula, and refuses what does not fit."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from pippin.data.batches import Batch
from pippin.engines import load_engine
from pippin.engines.torch.dora import DoraLinear
from pippin.engines.torch.lora import LoraLinear
from pippin.errors import ModelError
from pippin.model.adapter import adapted_linears, new_adapter
from pippin.model.weights import Checkpoint
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.torch


def layer(bias=True, dropout=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    base = torch.nn.Linear(7, 5, bias=bias, dtype=dtype).requires_grad_(False)
    exact = torch.promote_types(dtype, torch.float32)
    pair = torch.randn(3, 7, dtype=exact), torch.randn(5, 3, dtype=exact)
    return LoraLinear(base, pair, 0.5, dropout)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_values_and_gradients_equal_autograd(bias, dropout):
    ours = layer(bias, dropout).train()
    x = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    y = ours(x)
    y.pow(2).sum().backward()
    grads = x.grad, ours.lora_A.grad, ours.lora_B.grad
    x.grad = ours.lora_A.grad = ours.lora_B.grad = None
    torch.manual_seed(1)
    dropped = functional.dropout(x.view(-1, 7), dropout).view_as(x) if dropout else x
    update = dropped @ ours.lora_A.T @ ours.lora_B.T
    wanted = functional.linear(x, ours.weight, ours.bias) + 0.5 * update
    wanted.pow(2).sum().backward()
    torch.testing.assert_close(y, wanted)
    for mine, theirs in zip(grads, (x.grad, ours.lora_A.grad, ours.lora_B.grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_network_may_add_to_the_output_in_place():
    """As Falcon adds its attention to its MLP's output."""
    ours, x = layer(), torch.randn(2, 4, 7, dtype=torch.float64)
    (ours(x) + 1.0).pow(2).sum().backward()
    wanted, ours.lora_B.grad = ours.lora_B.grad, None
    y = ours(x)
    y += 1.0
    y.pow(2).sum().backward()
    torch.testing.assert_close(ours.lora_B.grad, wanted)


def test_dora_in_bfloat16_keeps_its_gain_in_float32():
    """In bfloat16's seven bits a gain of 1.0035 would be 1."""
    base = torch.nn.Linear(7, 5, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    ours = DoraLinear(base, (torch.randn(3, 7), torch.randn(5, 3)), 0.5, 0.0, torch.ones(5))
    ours.requires_grad_(False)
    x = torch.randn(400, 7, dtype=torch.bfloat16)
    ours._settled = torch.tensor(1.0035)
    plain, longer = ours.adapted(x, None), ours(x)
    assert torch.equal(longer, (plain.float() * 1.0035).bfloat16())
    assert not torch.equal(longer, plain)


def test_dropout_is_off_in_evaluation():
    ours, x = layer(dropout=0.9).eval(), torch.randn(4, 7, dtype=torch.float64)
    assert torch.equal(ours(x), ours(x))
    assert not torch.equal(ours.train()(x), ours.eval()(x))


def test_masters_stay_in_float32_under_a_bfloat16_base():
    ours = layer(dtype=torch.bfloat16)
    x = torch.randn(4, 7, dtype=torch.bfloat16, requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert ours.lora_A.grad.dtype == ours.lora_B.grad.dtype == torch.float32


def test_nothing_is_computed_for_an_input_without_gradient():
    """The first layer's input: its gradient would cost a product with the frozen weight."""
    ours, x = layer(), torch.randn(4, 7, dtype=torch.float64)
    ours(x).sum().backward()
    assert x.grad is None
    assert ours.weight.grad is None


def test_what_is_saved_for_backward():
    """The input, once for all neighbours, the rank-wide product, the frozen weight: no copies."""
    ours, saved = layer(), []
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(x)
    big = {t.data_ptr() for t in saved if t.numel() >= x.numel() and t.shape[0] != 3}
    assert big <= {x.data_ptr(), ours.weight.data_ptr(), ours.lora_B.data_ptr()} | {
        t.data_ptr() for t in saved if 3 in t.shape
    }


def test_an_adapter_of_another_base_is_refused(tiny, engine, adapter):
    model = engine.load(tiny("llama"), "float32")
    weights, name = adapter(model), "model.layers.0.mlp.up_proj"
    key = f"{name}.lora_A.weight"
    wide = {**weights, key: np.zeros((4, 64), np.float32)}
    with pytest.raises(ModelError, match=rf"{name}: lora_A of the adapter is \(4, 64\).*\(4, 32\)"):
        model.trainer(Train(), Lora(rank=4), wide, 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.9.mlp.up_proj", "no such layer"),
        ("model.embed_tokens", "is a Embedding, not a linear"),
    ],
)
def test_an_adapter_for_a_layer_that_is_no_linear_is_refused(tiny, engine, name, words):
    model = engine.load(tiny("llama"), "float32")
    pair = {f"{name}.lora_{s}.weight": np.zeros((4, 4), np.float32) for s in "AB"}
    with pytest.raises(ModelError, match=words):
        model.trainer(Train(), Lora(rank=4), pair, 0)


def test_weights_come_back_as_they_went_in(tiny, engine, adapter):
    model = engine.load(tiny("llama"), "bfloat16")
    weights = adapter(model, live=True)
    trainer = model.trainer(Train(), Lora(rank=4), weights, 0)
    back = trainer.weights()
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array)


def test_gpt2s_transposed_linear_trains_as_pefts_does(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32,
        n_head=2,
        n_layer=1,
        vocab_size=97,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    network = transformers.GPT2LMHeadModel(config)
    network.save_pretrained(tmp_path)
    lora = Lora(rank=2, alpha=4, targets=("c_attn", "c_fc"))
    weights = new_adapter(adapted_linears(Checkpoint(tmp_path), lora), lora, seed=0)
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(0, 0.1, w.shape).astype(np.float32) for n, w in weights.items()}
    settings = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    )
    theirs = peft.get_peft_model(network, settings).eval()
    for name, parameter in theirs.named_parameters():
        key = name.removeprefix("base_model.model.").replace(".default.", ".")
        if key in weights:
            parameter.data = torch.from_numpy(weights[key])
    tokens_BT = np.array([[5, 17, 3, 80, 41]], np.int32)
    tokens = torch.from_numpy(tokens_BT).long()
    theirs(input_ids=tokens, labels=tokens).loss.mul(4).backward()
    trainer = (
        load_engine("torch", "cpu").load(tmp_path, "float32").trainer(Train(), lora, weights, 0)
    )
    positions = np.arange(5, dtype=np.int32)[None]
    ones = np.ones_like(positions)
    loss = trainer._backward(
        Batch(
            tokens_BT=tokens_BT, positions_BT=positions, segments_BT=ones, scored_BT=positions > 0
        )
    )
    assert loss.item() == pytest.approx(theirs(input_ids=tokens, labels=tokens).loss.item() * 4)
    found = dict(trainer.network.named_parameters())
    for name, parameter in theirs.named_parameters():
        key = name.removeprefix("base_model.model.").replace(".default.weight", "")
        if "lora_" in name:
            torch.testing.assert_close(found[key].grad, parameter.grad, rtol=1e-4, atol=1e-6)
