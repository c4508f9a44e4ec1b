"""What every engine must do alike: the properties of the interface, on a tiny random model."""

import numpy as np
import pytest

from pippin.data.batches import Batch
from pippin.engines import Sampling
from pippin.recipe import Lora, Train

LORA = Lora(rank=4, alpha=8)
LINEARS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (32, 32),
        "self_attn.v_proj": (32, 16),
        "mlp.down_proj": (48, 32),
    }.items()
}


@pytest.fixture(scope="session")
def folder(tiny):
    return tiny("llama_tied")


@pytest.fixture(scope="session")
def tokens():
    return np.random.default_rng(1).integers(3, 97, (3, 12)).astype(np.int32)


@pytest.fixture
def first():
    rng = np.random.default_rng(0)
    pairs = {}
    for name, (inputs, outputs) in LINEARS.items():
        pairs[f"{name}.lora_A.weight"] = rng.uniform(-0.3, 0.3, (4, inputs)).astype(np.float32)
        pairs[f"{name}.lora_B.weight"] = np.zeros((outputs, 4), np.float32)
    return pairs


def one_a_row(tokens) -> Batch:
    rows, columns = tokens.shape
    positions = np.broadcast_to(np.arange(columns, dtype=np.int32), tokens.shape)
    return Batch(
        tokens_BT=tokens,
        positions_BT=positions,
        segments_BT=np.ones((rows, columns), np.int32),
        scored_BT=positions > 0,
    )


def two_in_a_row(tokens) -> Batch:
    """The rows cut in two samples of 5 and 7 tokens."""
    positions = np.concatenate([np.arange(5), np.arange(7)]).astype(np.int32)
    positions = np.broadcast_to(positions, tokens.shape)
    segments = np.broadcast_to(np.repeat([1, 2], [5, 7]).astype(np.int32), tokens.shape)
    return Batch(
        tokens_BT=tokens, positions_BT=positions, segments_BT=segments, scored_BT=positions > 0
    )


def test_logprobs_are_normalised(engine, folder, tokens):
    model = engine.load(folder, "float32")
    logprobs = model.logprobs(tokens)
    assert logprobs.shape == (3, 11)
    assert logprobs.dtype == np.float32
    assert (logprobs <= 0).all()
    whole = model.topk(tokens, 97)
    np.testing.assert_allclose(np.exp(whole.logprobs_BTK.astype(float)).sum(-1), 1, atol=1e-5)


def test_topk_is_sorted_and_agrees_with_logprobs(engine, folder, tokens):
    model = engine.load(folder, "float32")
    top = model.topk(tokens, 6)
    assert top.ids_BTK.shape == top.logprobs_BTK.shape == (3, 12, 6)
    assert top.ids_BTK.dtype == np.int32
    assert (np.diff(top.logprobs_BTK, axis=-1) <= 0).all()
    following = np.roll(tokens, -1, 1)[..., None]
    given = model.topk(tokens, 2, following)
    np.testing.assert_allclose(given.logprobs_BTK[:, :-1, 2], model.logprobs(tokens), atol=1e-5)
    np.testing.assert_allclose(given.logprobs_BTK[..., :2], top.logprobs_BTK[..., :2], atol=1e-5)


def test_a_token_depends_on_its_past_alone(engine, folder, tokens):
    model, changed = engine.load(folder, "float32"), tokens.copy()
    changed[:, 6:] = 5
    np.testing.assert_allclose(
        model.logprobs(changed)[:, :5], model.logprobs(tokens)[:, :5], atol=1e-6
    )


def test_greedy_follows_topk(engine, folder, tokens):
    model = engine.load(folder, "float32")
    prompts = [tokens[0, :4], tokens[1, :9]]
    steps = list(model.generate(prompts, Sampling(max_tokens=5)))
    for row, prompt in enumerate(prompts):
        whole = np.concatenate([prompt, [step[row] for step in steps]]).astype(np.int32)
        best = model.topk(whole[None], 1).ids_BTK[0, :, 0]
        np.testing.assert_array_equal(best[len(prompt) - 1 : -1], whole[len(prompt) :])


def test_the_first_loss_is_that_of_the_model(engine, folder, tokens, first):
    wanted = -engine.load(folder, "float32").logprobs(tokens).sum()
    trainer = engine.load(folder, "float32").trainer(Train(), LORA, first, 0)
    loss, count = trainer.loss(one_a_row(tokens))
    assert count == 33
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert trainer.step([one_a_row(tokens)], 1e-3).loss_sum == pytest.approx(wanted, rel=1e-5)


def test_packed_samples_do_not_see_each_other(engine, folder, tokens, first):
    model = engine.load(folder, "float32")
    wanted = -(model.logprobs(tokens[:, :5]).sum() + model.logprobs(tokens[:, 5:]).sum())
    trainer = model.trainer(Train(), LORA, first, 0)
    assert trainer.loss(two_in_a_row(tokens))[0] == pytest.approx(wanted, rel=1e-5)


def test_training_lowers_the_loss_and_moves_every_tensor(engine, folder, tokens, first):
    trainer = engine.load(folder, "float32").trainer(Train(), LORA, first, 0)
    losses = [trainer.step([one_a_row(tokens)], 1e-2).loss_sum for _ in range(8)]
    assert losses[-1] < 0.97 * losses[0]
    weights = trainer.weights()
    assert weights.keys() == first.keys()
    for name, array in weights.items():
        assert array.dtype == np.float32
        assert not np.array_equal(array, first[name]), name


def test_a_state_goes_on_bit_for_bit(engine, folder, tokens, first):
    def trainer():
        lora = Lora(rank=4, alpha=8, dropout=0.2)
        return engine.load(folder, "float32").trainer(Train(), lora, first, 7)

    batches = [one_a_row(tokens), two_in_a_row(tokens)]
    straight, broken, resumed = trainer(), trainer(), trainer()
    results = [straight.step(batches, 1e-2) for _ in range(4)]
    again = [broken.step(batches, 1e-2) for _ in range(2)]
    resumed.restore(broken.state())
    again += [resumed.step(batches, 1e-2) for _ in range(2)]
    assert again == results
    for name, array in straight.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], array)


def test_a_state_is_plain_arrays(engine, folder, tokens, first):
    trainer = engine.load(folder, "float32").trainer(Train(), LORA, first, 0)
    trainer.step([one_a_row(tokens)], 1e-2)
    for name, array in trainer.state().items():
        assert isinstance(array, np.ndarray), name
        assert array.ndim > 0, name


def test_moments_are_symmetric_and_positive(engine, folder, tokens):
    moments = engine.load(folder, "float32").input_moments([two_in_a_row(tokens)])
    assert LINEARS.keys() <= moments.keys()
    for name, (inputs, _) in LINEARS.items():
        moment = moments[name]
        assert moment.shape == (inputs, inputs)
        np.testing.assert_allclose(moment, moment.T, rtol=1e-5, atol=1e-4)
        assert np.linalg.eigvalsh(moment.astype(float)).min() > -1e-3 * moment.max()


def test_moments_of_some_linears(engine, folder, tokens):
    model, batches = engine.load(folder, "float32"), [two_in_a_row(tokens)]
    whole = model.input_moments(batches)
    layer = "model.layers.0."
    reads = {layer + f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    asked = {*reads, layer + "mlp.down_proj", "lm_head", "no.such.linear"}
    some = model.input_moments(batches, asked)
    assert some.keys() == asked & whole.keys()
    for name, moment in some.items():
        np.testing.assert_array_equal(moment, whole[name])
    assert len({id(some[name]) for name in reads}) == 1, "one array for one input"
    assert model.input_moments(batches, frozenset()) == {}


def test_an_engine_names_its_device_and_memory(engine):
    assert engine.device().startswith("cpu")
    assert engine.dtype("float32") == "float32"
    assert engine.dtype("auto") in ("float32", "bfloat16")
    assert engine.peak_memory() > 0
