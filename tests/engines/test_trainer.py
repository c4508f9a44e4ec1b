"""The training step: accumulation, resuming bit for bit, refusal of bad updates, full tuning."""

from dataclasses import astuple

import numpy as np
import pytest
import torch

from pippin.engines.torch.recomputed import checkpoint_activations
from pippin.errors import ModelError, UsageError
from pippin.recipe import Lora, Train

pytestmark = pytest.mark.torch

LORA = Lora(rank=4, alpha=8, dropout=0.0)


@pytest.fixture
def start(tiny, engine, adapter):
    """A trainer on the tiny Llama: settings, adapter settings, dtype."""

    def make(train=None, lora=LORA, dtype="float32", kind="llama", seed=0):
        model = engine.load(tiny(kind), dtype)
        weights = adapter(model) if lora else {}
        return model.trainer(train or Train(), lora, weights, seed)

    return make


def gradients(trainer, batches):
    """The summed gradients, as `step` makes them, before the update."""
    trainer.network.train()
    for batch in batches:
        trainer._backward(batch)
    return {n: m.grad.double().clone() for n, m in trainer.optimizer.masters.items()}


@pytest.mark.parametrize(
    ("lora", "dtype", "tolerance"),
    [(LORA, "float32", 2e-5), (None, "float32", 2e-5), (LORA, "float64", 1e-10)],
)
def test_small_batches_add_up_to_the_big_one(start, samples, pack, lora, dtype, tolerance):
    """Token-weighted: the parts have different lengths and different counts of scored tokens."""
    big = gradients(start(lora=lora, dtype=dtype), [pack([samples])])
    parts = [pack([samples[:1]]), pack([samples[1:3]]), pack([samples[3:]])]
    small = gradients(start(lora=lora, dtype=dtype), parts)
    for name, grad in big.items():
        scale = max(grad.abs().max().item(), 1e-6)
        torch.testing.assert_close(small[name], grad, rtol=0, atol=tolerance * scale)


def test_the_result_counts_tokens_and_sums_the_loss(start, samples, pack):
    trainer = start()
    batches = [pack([samples[:2]]), pack([samples[2:]])]
    wanted = sum(trainer.loss(batch)[0] for batch in batches)
    result = trainer.step(batches, 1e-3)
    assert result.tokens == sum(len(s) - 1 for s in samples)
    assert result.loss_sum == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("train", "lora", "dtype"),
    [
        (Train(), Lora(rank=4, dropout=0.3), "float32"),
        (Train(gradient_checkpointing=True), Lora(rank=4, dropout=0.3), "bfloat16"),
        (Train(weight_decay=0.1), None, "bfloat16"),
        (Train(), None, "float32"),
    ],
)
def test_n_and_n_steps_equal_two_n_bit_for_bit(start, samples, pack, train, lora, dtype):
    steps = [[pack([samples[i:]]), pack([samples[: i + 1]])] for i in range(4)]
    whole = start(train, lora, dtype)
    straight = [whole.step(batches, 1e-2) for batches in steps]
    first = start(train, lora, dtype)
    resumed = [first.step(batches, 1e-2) for batches in steps[:2]]
    state = {name: array.copy() for name, array in first.state().items()}
    torch.manual_seed(123)
    second = start(train, lora, dtype)
    second.restore(state)
    resumed += [second.step(batches, 1e-2) for batches in steps[2:]]
    assert resumed == straight
    for name, array in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], array, err_msg=name)


def test_dropout_drops_and_differs_by_step_and_seed(start, samples, pack):
    lora, batch = Lora(rank=4, dropout=0.5), pack([samples])
    trainer, other = start(lora=lora), start(lora=lora, seed=1)
    assert trainer.step([batch], 1e-2).loss_sum == other.step([batch], 1e-2).loss_sum  # B is zero
    assert trainer.step([batch], 1e-2).loss_sum != other.step([batch], 1e-2).loss_sum
    losses = {trainer.step([batch], 0.0).loss_sum for _ in range(3)}
    assert len(losses) == 3
    # Micro-batches of an update that are alike lose other elements.
    assert len({trainer._backward(batch, number).item() for number in (0, 1, 0)}) == 2
    assert trainer.loss(batch) == trainer.loss(batch)


def test_a_step_leaves_the_random_state_of_others_alone(start, samples, pack):
    trainer = start(lora=Lora(rank=4, dropout=0.5))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    trainer.step([pack([samples])], 1e-3)
    assert torch.equal(torch.rand(3), wanted)


def computed_again(trainer):
    """By layer, whether transformers computes it again, or what stands around our own code."""
    return [
        layer.gradient_checkpointing or layer.forward.__qualname__.startswith("_recomputing")
        for layer in trainer.network.model.layers
    ]


@pytest.mark.parametrize("lora", [LORA, None])
def test_checkpointing_changes_memory_not_numbers(start, samples, pack, lora):
    batch = [pack([samples])]
    plain, recomputed = (start(Train(gradient_checkpointing=on), lora) for on in (False, True))
    assert computed_again(recomputed) == [True, True]
    assert computed_again(plain) == [False, False]
    half = start(Train(gradient_checkpointing=True, recomputed_layers=0.5), lora)
    assert computed_again(half) == [True, False]
    wanted = plain.step(batch, 1e-2)
    assert wanted == recomputed.step(batch, 1e-2) == half.step(batch, 1e-2)


def test_a_share_of_layers_that_are_in_no_list_is_refused(start):
    network = start().network
    network.config.num_hidden_layers = 7  # in no list of so many
    with pytest.raises(ModelError, match="no list of decoder layers"):
        checkpoint_activations(network, 0.5)


def test_the_frozen_weights_are_never_touched(start, samples, pack):
    trainer = start()
    frozen = {n: p.clone() for n, p in trainer.network.named_parameters() if not p.requires_grad}
    assert len(frozen) > 10
    for _ in range(3):
        trainer.step([pack([samples])], 1e-1)
    parameters = dict(trainer.network.named_parameters())
    for name, before in frozen.items():
        assert torch.equal(parameters[name], before)
        assert parameters[name].grad is None


def test_no_update_where_the_loss_is_not_finite(start, samples, pack):
    trainer = start()
    trainer.step([pack([samples])], 1e-2)
    before = trainer.state()
    with torch.no_grad():
        trainer.network.model.norm.weight.fill_(float("nan"))
    result = trainer.step([pack([samples])], 1e-2)
    assert not np.isfinite(result.loss_sum)
    after = trainer.state()
    for name in before.keys() - {"steps"}:
        np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.parametrize("limit", [0.01, 1e3])
def test_clipping_bounds_the_update(start, samples, pack, limit):
    """With plain gradients handed to AdamW: its first moment shows what arrived."""
    batch = [pack([samples])]
    free, clipped = (start(Train(max_grad_norm=most)) for most in (0.0, limit))
    norm = free.step(batch, 1e-3).grad_norm
    assert clipped.step(batch, 1e-3).grad_norm == norm
    key = next(k for k in free.state() if k.startswith("exp_avg.") and "lora_B" in k)
    ratio = clipped.state()[key] / free.state()[key]
    np.testing.assert_allclose(ratio, min(1, limit / norm), rtol=1e-4)


def test_a_tensor_that_does_not_move_is_named(start, samples, pack, monkeypatch):
    trainer = start()
    stuck = "model.layers.1.mlp.up_proj.lora_B.weight"
    step = trainer.optimizer.adam.step

    def lossy():
        kept = trainer.optimizer.masters[stuck].detach().clone()
        step()
        with torch.no_grad():
            trainer.optimizer.masters[stuck].copy_(kept)

    monkeypatch.setattr(trainer.optimizer.adam, "step", lossy)
    with pytest.raises(ModelError, match=f"1 trainable tensors did not move in update 1: {stuck}"):
        trainer.step([pack([samples])], 1e-2)


def test_lora_a_may_wait_for_one_update_only(start, samples, pack, monkeypatch):
    trainer = start()
    trainer.step([pack([samples])], 1e-2)
    monkeypatch.setattr(trainer.optimizer.adam, "step", lambda: None)
    with pytest.raises(
        ModelError, match=r"14 trainable tensors did not move in update 2: .*lora_A"
    ):
        trainer.step([pack([samples])], 1e-2)


def test_a_zero_learning_rate_is_no_fault(start, samples, pack):
    trainer = start()
    for rate in (0.0, 0.0, 1e-3, 1e-3, 1e-3):
        trainer.step([pack([samples])], rate)


def test_full_tuning_equals_a_plain_adamw_loop(tiny, start, samples, pack):
    from transformers import AutoModelForCausalLM

    train = Train(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    trainer = start(train, None, kind="llama_tied")
    plain = AutoModelForCausalLM.from_pretrained(tiny("llama_tied"), dtype=torch.float32)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, eps=train.eps)
    count = sum(len(s) - 1 for s in samples)
    for _ in range(4):
        result = trainer.step([pack([samples])], 1e-3)
        total = 0.0
        for sample in samples:
            tokens = torch.tensor(sample[None]).long()
            logits = plain(input_ids=tokens).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
        assert result.loss_sum == pytest.approx(total.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    weights = trainer.weights()
    assert "lm_head.weight" not in weights
    for name, parameter in plain.named_parameters():
        np.testing.assert_allclose(weights[name], parameter.detach().numpy(), atol=2e-5)


def test_full_tuning_in_bfloat16_keeps_what_bfloat16_would_lose(start, samples, pack):
    """Updates of 1e-5 vanish in bfloat16 weights near 1; float32 masters collect them."""
    trainer = start(None, None, "bfloat16")
    before = trainer.weights()["model.norm.weight"]
    for _ in range(3):
        trainer.step([pack([samples])], 1e-5)
    after = trainer.weights()["model.norm.weight"]
    assert after.dtype == np.float32
    assert 1e-5 < np.abs(after - before).max() < 4e-5


def test_restoring_another_adapter_is_refused(start, samples, pack):
    trainer = start()
    trainer.step([pack([samples])], 1e-3)
    state = trainer.state()
    name = next(iter(trainer.weights()))
    state[f"weights.{name}"] = state[f"weights.{name}"][:2]
    with pytest.raises(ModelError, match=r"the checkpoint's weights.*is \(2, .*needs \(4, "):
        start().restore(state)
    del state[f"weights.{name}"]
    with pytest.raises(ModelError, match="is missing"):
        start().restore(state)


def test_float8_is_refused_where_it_does_not_run(tiny, engine, adapter):
    model = engine.load(tiny("llama"), "float32")
    with pytest.raises(UsageError, match="float8"):
        model.trainer(Train(frozen_dtype="float8"), Lora(rank=4), adapter(model), 0)


@pytest.mark.parametrize("spoiled", [False, True])
def test_going_ahead_changes_no_number(start, samples, pack, spoiled):
    """As on CUDA: the next update's first micro-batch is through when a step's figures are told."""
    steps = [[pack([samples[i:]]), pack([samples[: i + 1]])] for i in range(4)]
    train, lora = Train(gradient_checkpointing=True), Lora(rank=4, dropout=0.3)
    plain, ahead = (start(train, lora) for _ in range(2))
    ahead.goes_ahead, results = True, []
    for trainer in (plain, ahead):
        for step, batches in enumerate(steps):
            told = steps[(step + 1 + (step == 1)) % 4]  # once it is told of others than come
            results.append(astuple(trainer.step(batches, 1e-2, lambda told=told: told)))
            if spoiled and step == 2:
                trainer.network.model.norm.weight.fill_(float("nan"))
        results.append(trainer.loss(steps[0][0]))
        results.append(trainer.state())
    half = len(results) // 2
    np.testing.assert_equal(results[half:], results[:half])
