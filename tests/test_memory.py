"""The arithmetic of memory against figures counted by hand, by transformers, and by a training."""

from dataclasses import replace

import pytest

from pippin import memory
from pippin.memory.layers import TrainShape
from pippin.memory.training import train_bytes
from pippin.model.config import parse_config

SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
TALK = {
    **SMOL,
    "num_hidden_layers": 26,
    "hidden_size": 3200,
    "intermediate_size": 8640,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def config(raw):
    return parse_config(raw, None)


def test_parameters_are_those_of_the_published_models():
    assert memory.parameters(config(SMOL)) == 134_515_008
    assert memory.parameters(config(TALK)) == 3_426_473_600


def test_adapter_parameters():
    one_layer = memory.linear_shapes(config(SMOL)).values()
    # q, o: 576+576; k, v: 576+192; gate, up, down: 576+1536
    by_hand = 8 * (2 * 1152 + 2 * 768 + 3 * 2112)
    assert memory.adapter_parameters(one_layer, 8) == by_hand


@pytest.mark.parametrize(
    ("itemsize", "saved"), [(4, 1_323_208_528), (2, 737_853_264)], ids=["float32", "bfloat16"]
)
def test_activations_are_what_a_training_saves(itemsize, saved):
    """`saved` was counted through autograd's hooks: SmolLM2-135M, one packed row of 1,024."""
    forecast = memory.activations(config(SMOL), 1024, itemsize)
    assert forecast == pytest.approx(saved, rel=0.1)


def adapter_of_all(**changed):
    asked = TrainShape(
        device="cpu",
        tokens=512,
        row=512,
        longest=512,
        itemsize=2,
        trained=1_000_000,
        checkpointing=False,
        adapted=frozenset(memory.LINEARS),
        rank=16,
        kernels=False,
    )
    return replace(asked, **changed)


def test_training_an_adapter_by_hand():
    need = train_bytes(config(SMOL), adapter_of_all())
    assert need.weights == 2 * 134_515_008
    assert (need.masters, need.gradients, need.moments) == (4_000_000, 4_000_000, 8_000_000)
    # a chunk of 32 MiB in two bytes, a block of it in four, three tensors of hidden states
    assert need.at_loss == 2**25 + 2**20 + 3 * 512 * 2 * 576
    # norms 4D, attention 2Q + 2K, feed-forward 3F, seven narrow products, eleven figures in float32
    layer = 512 * (2 * (4 * 576 + 2 * 576 + 2 * 192 + 3 * 1536 + 7 * 16) + 4 * 11)
    assert need.kept == 30 * layer + 2 * 1_000_000
    assert need.total == need.weights + 12_000_000 + need.kept + max(need.at_loss, need.in_backward)


def test_layers_by_hand_on_a_cpu_keep_what_they_cannot_make_again():
    need = train_bytes(config(SMOL), adapter_of_all(kernels=True))
    # input and middle 2D, query, key, value and output 2Q + 2K, gate and up 2F, narrow products
    assert need.kept == 30 * 512 * 2 * (2 * 576 + 2 * 576 + 2 * 192 + 2 * 1536 + 7 * 16)
    assert need.weights == 2 * 134_515_008


def test_checkpointing_keeps_one_layer_and_inputs():
    whole, spared = (
        train_bytes(config(SMOL), adapter_of_all(checkpointing=on)) for on in (False, True)
    )
    assert spared.kept == 30 * 512 * 2 * 576 + 2 * 1_000_000 // 30
    assert spared.in_backward > whole.in_backward
    assert spared.total < whole.total


def test_full_fine_tuning_needs_sixteen_bytes_a_weight_in_float32():
    trained = memory.parameters(config(SMOL))
    full = adapter_of_all(tokens=1, itemsize=4, trained=trained, adapted=frozenset())
    need = train_bytes(config(SMOL), full)
    assert need.weights + need.masters + need.gradients + need.moments == 16 * trained


def test_attention_on_mps_keeps_its_weights():
    """PyTorch has no backward of its fused attention there: float32 weights of every head."""
    short, long = (
        train_bytes(config(SMOL), adapter_of_all(device="mps", longest=length)).kept
        for length in (256, 512)
    )
    assert long - short == 30 * 512 * 9 * 256 * 4


def test_layers_by_hand_stand_in_frames():
    need = train_bytes(config(SMOL), adapter_of_all(device="cuda", kernels=True))
    # rows of multiples of 64 elements: 576 + 48, 576 + 16, 576 + 32, 1536 + 16
    layer = (960 + 48) * 640 + (576 + 16) * 640 + (3072 + 32) * 640 + (576 + 16) * 1600
    rest = 49152 * 576 + 30 * 2 * 576 + 576
    assert need.weights == 2 * (30 * layer + rest)


def test_loss_does_not_grow_with_the_batch():
    shape = config(SMOL)
    few, many = (memory.loss_bytes(shape, tokens, 4) for tokens in (1_000, 100_000))
    assert many - few == 99_000 * 4 * 576, "only the hidden states' gradient"


def test_cache():
    # 2 x layers x rows x tokens x kv heads x channels x bytes
    assert memory.cache_bytes(config(SMOL), 4, 100, 2) == 2 * 30 * 4 * 100 * 3 * 64 * 2


# Inputs, then outputs: q, o and down have 576, k and v 192, gate and up 1536.
_SMOL_MOMENTS = 4 * (6 * 576**2 + 1536**2 + 3 * 576**2 + 2 * 192**2 + 2 * 1536**2)


def test_moments_of_many_outputs():
    assert memory.linear_moments(4096, 11008) == 4 * (4096**2 + 11008 * 2048)


def test_calibration_by_hand():
    shape = config(SMOL)
    moments = 30 * _SMOL_MOMENTS
    layer = memory.layer_activations(shape, 2048, 2)
    weights = 2 * memory.parameters(shape)
    found = memory.calibrate_bytes(shape, 2, 2048)
    assert found == weights + moments + layer + 8 * 1536**2 + 5120 * 1536
    wide = config({**SMOL, "intermediate_size": 15360})
    room = memory.calibrate_bytes(wide, 2, 2048) - 2 * memory.parameters(wide)
    rest = memory.layer_activations(wide, 2048, 2) + 8 * 15360**2 + 5120 * 15360
    assert room == memory.MOMENTS + rest


def test_calibration_layer_by_layer_by_hand():
    shape = config(SMOL)
    linears = sum(i * o for i, o in memory.linear_shapes(shape).values())
    held = 2 * (linears + 49152 * 576 + 8192 * 576) + _SMOL_MOMENTS
    layer = memory.layer_activations(shape, 1024, 2)
    assert memory.layered_bytes(shape, 2, (1024, 8192)) == held + layer + 8 * 1536**2 + 5120 * 1536


def test_quantized_size_by_hand():
    shape = config(SMOL)
    layer = sum(i * o for i, o in memory.linear_shapes(shape).values())
    linears = 30 * (layer // 2 + 4 * layer // 64)
    embedding = 49152 * 576 + 4 * 49152 * 576 // 64
    norms = 2 * 61 * 576
    assert memory.quantized_size(shape, ((4, 64), (8, 64))) == linears + embedding + norms
    dense = memory.quantized_size(shape, ((16, 0), (16, 0)))
    assert dense == 2 * memory.parameters(shape)


def test_a_group_that_does_not_divide_is_rounded_up():
    shape = config({**SMOL, "hidden_size": 96, "num_attention_heads": 1, "head_dim": 96})
    narrow = memory.quantized_size(shape, ((4, 64), (16, 0)))
    wide = memory.quantized_size(shape, ((4, 32), (16, 0)))
    assert narrow < wide, "two groups of 64 against three of 32"


def test_merge_holds_one_tensor():
    assert memory.largest_tensor(config(SMOL)) == 49152 * 576
    assert memory.merge_bytes(config(SMOL), 2) == 49152 * 576 * 12
