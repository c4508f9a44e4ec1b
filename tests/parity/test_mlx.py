"""transformers, peft and PyTorch's training as oracles of the MLX engine."""

import json

import numpy as np
import pytest

pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.tiny_runs import quantize_folder  # noqa: E402

from pippin.data.batches import Batch  # noqa: E402
from pippin.engines import Sampling, load_engine  # noqa: E402
from pippin.errors import ModelError  # noqa: E402
from pippin.model.adapter import (  # noqa: E402
    Base,
    adapted_linears,
    first_magnitudes,
    load_adapter,
    new_adapter,
    save_adapter,
)
from pippin.model.weights import Checkpoint  # noqa: E402
from pippin.recipe import Lora, Train  # noqa: E402
from pippin.stages.outcome import write_model  # noqa: E402

pytestmark = [pytest.mark.mlx, pytest.mark.torch]

KINDS = ("llama", "llama_tied", "llama_bias", "llama_head100", "qwen2", "qwen3", "gemma3")
SCALED = ("cohere", "granite")
LORA = Lora(rank=4, alpha=8)
DORA = Lora(rank=4, alpha=8, dora=True)
AFFINE = {"bits": 3, "group_size": 32, "embed_group_size": 32}
A_ROW = {**AFFINE, "scheme": "symmetric", "group_size": 0}


@pytest.fixture(scope="module")
def engines():
    torch.set_num_threads(1)
    return load_engine("mlx", "cpu"), load_engine("torch", "cpu")


def tokens(rows=3, columns=12):
    return np.random.default_rng(1).integers(3, 97, (rows, columns)).astype(np.int32)


def packed(seed):
    """One row of three samples, of lengths that differ from seed to seed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 14, 3)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32)
    return Batch(
        tokens_BT=rng.integers(3, 97, positions.shape).astype(np.int32),
        positions_BT=positions,
        segments_BT=np.repeat([1, 2, 3], lengths)[None].astype(np.int32),
        scored_BT=positions > 0,
    )


def single(rows):
    """Each row a sample, scored from its second token on."""
    positions = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    ones = np.ones_like(rows)
    return Batch(tokens_BT=rows, positions_BT=positions, segments_BT=ones, scored_BT=positions > 0)


def first(folder, lora=LORA):
    checkpoint = Checkpoint(folder)
    linears = adapted_linears(checkpoint, lora)
    magnitudes = first_magnitudes(checkpoint, linears) if lora.dora else {}
    return new_adapter(linears, lora, seed=0) | magnitudes


@pytest.mark.parametrize("kind", KINDS + SCALED)
def test_scores_are_those_of_pytorch(engines, tiny, kind):
    ours, wanted = (engine.load(tiny(kind), "float32") for engine in engines)
    np.testing.assert_allclose(ours.logprobs(tokens()), wanted.logprobs(tokens()), atol=2e-5)
    given = np.roll(tokens(), -1, 1)[..., None]
    tops = [model.topk(tokens(), 5, given) for model in (ours, wanted)]
    np.testing.assert_array_equal(tops[0].ids_BTK, tops[1].ids_BTK)
    np.testing.assert_allclose(tops[0].logprobs_BTK, tops[1].logprobs_BTK, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_answers_are_those_of_pytorch(engines, tiny, kind, sampling):
    """Prompts of different lengths, some ending before others, past the sliding window."""
    prompts = [tokens()[0, :3], tokens()[1, :9], tokens()[2]]
    models = [engine.load(tiny(kind), "float32") for engine in engines]
    free = list(models[1].generate(prompts, Sampling(max_tokens=14, **sampling)))
    asked = Sampling(max_tokens=14, stop=frozenset({free[5][0]}), **sampling)
    ours, wanted = (list(model.generate(prompts, asked)) for model in models)
    assert ours == wanted
    assert any(None in step for step in ours), "no row ended"
    assert list(models[0].generate(prompts, Sampling(max_tokens=14, **sampling))) == free


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
def test_fifty_steps_have_the_losses_of_pytorch(engines, tiny, kind):
    folder, train = tiny(kind), Train(weight_decay=0.01)
    trainers = [e.load(folder, "float32").trainer(train, LORA, first(folder), 0) for e in engines]
    losses = []
    for number in range(50):
        batches = [packed(2 * number), packed(2 * number + 1)]
        results = [trainer.step(batches, 5e-3) for trainer in trainers]
        losses.append([result.loss_sum / result.tokens for result in results])
    ours, wanted = np.array(losses).T
    assert wanted[-1] < wanted[0], "nothing was learned"
    np.testing.assert_allclose(ours, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2"])
def test_full_training_is_that_of_pytorch(engines, tiny, kind):
    trainers = [e.load(tiny(kind), "float32").trainer(Train(), None, {}, 0) for e in engines]
    for number in range(10):
        ours, wanted = (trainer.step([packed(number)], 1e-3) for trainer in trainers)
        assert ours.loss_sum / ours.tokens == pytest.approx(
            wanted.loss_sum / wanted.tokens, abs=1e-4
        )
        assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)
    weights, others = (trainer.weights() for trainer in trainers)
    assert weights.keys() == others.keys()


def test_an_adapted_head_trains_as_in_pytorch(engines, tiny):
    lora = Lora(rank=4, alpha=8, targets=("lm_head", "q_proj"))
    start = first(tiny("llama"), lora)
    trainers = [e.load(tiny("llama"), "float32").trainer(Train(), lora, start, 0) for e in engines]
    for number in range(5):
        ours, wanted = (trainer.step([packed(number)], 1e-2) for trainer in trainers)
        assert ours.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)
    assert "full logits" in " ".join(trainers[0].notices)


@pytest.mark.parametrize("lora", [LORA, DORA])
def test_peft_loads_what_was_trained_here(engines, tiny, tmp_path, lora):
    """With biases; trained as PyTorch trains it."""
    folder = tiny("llama_bias")
    start = first(folder, lora)
    trainers = [e.load(folder, "float32").trainer(Train(), lora, start, 0) for e in engines]
    for number in range(4):
        ours, wanted = (trainer.step([packed(number)], 1e-2) for trainer in trainers)
        assert ours.loss_sum / ours.tokens == pytest.approx(
            wanted.loss_sum / wanted.tokens, abs=1e-4
        )
    save_adapter(tmp_path, lora, trainers[0].weights(), Base(name="tiny", digest=""))
    logits = peft_logits(folder, tmp_path)
    for engine in engines:
        scored = engine.load(folder, "float32", tmp_path).logprobs(tokens())
        np.testing.assert_allclose(scored, logits, atol=2e-5)
    plain = engines[0].load(folder, "float32").logprobs(tokens())
    assert np.abs(plain - logits).max() > 1e-2, "the adapter does nothing"


def test_an_adapter_of_peft_loads_here(engines, tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "down_proj"]
    )
    base = AutoModelForCausalLM.from_pretrained(tiny("qwen3"))
    model = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    scored = engines[0].load(tiny("qwen3"), "float32", tmp_path).logprobs(tokens())
    np.testing.assert_allclose(scored, peft_logits(tiny("qwen3"), tmp_path), atol=2e-5)
    assert load_adapter(tmp_path).rank == 3


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_lm_loads_in_every_engine(engines, tiny, tmp_path, kind):
    """Written by mlx-lm, against mlx-lm's own logits with it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from pippin.engines.mlx.load import load_network

    network = load_network(tiny("llama"), mx.float32)
    settings = {"rank": 3, "scale": 1.7, "dropout": 0.0}
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    linear_to_lora_layers(network, 2, settings | {"keys": keys}, use_dora=kind == "dora")
    trained = dict(tree_flatten(network.trainable_parameters()))
    rng = np.random.default_rng(2)
    filled = {
        n: mx.array(rng.normal(0, 0.2, a.shape).astype(np.float32)) for n, a in trained.items()
    }
    network.load_weights(list(filled.items()), strict=False)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), filled)
    config = {
        "fine_tune_type": kind,
        "num_layers": 2,
        "lora_parameters": settings | {"keys": keys},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    logits = torch.from_numpy(np.array(network(mx.array(tokens()[:, :-1]))))
    ids = torch.from_numpy(tokens()).long()
    wanted = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    for engine in engines:
        scored = engine.load(tiny("llama"), "float32", tmp_path).logprobs(tokens())
        np.testing.assert_allclose(scored, wanted, atol=2e-5)
    config["fine_tune_type"] = "full"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mlx-lm adapter of type full"):
        load_adapter(tmp_path)


@torch.no_grad()
def peft_logits(folder, adapter):
    """peft's log-probabilities of `tokens()`."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    ids = torch.from_numpy(tokens()).long()
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])[..., 0].numpy()


def test_rope_of_the_config_is_used(engines, tiny, tmp_path):
    """transformers 5 keeps theta where mlx-lm does not look."""
    folder = changed(
        tiny("llama"), tmp_path, rope_parameters={"rope_theta": 7e5, "rope_type": "default"}
    )
    ours, wanted = (engine.load(folder, "float32").logprobs(tokens()) for engine in engines)
    np.testing.assert_allclose(ours, wanted, atol=2e-5)
    assert np.abs(ours - engines[0].load(tiny("llama"), "float32").logprobs(tokens())).max() > 1e-3


def changed(folder, target, **keys):
    """The folder with other keys in its config."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | keys))
    return target


def test_mlx_lm_loads_the_layout_it_knows(engines, tiny, tmp_path):
    """Of an adapter on some layers, on some linears, with its own scale."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters

    from pippin.engines.mlx.load import load_network
    from pippin.model import mlx_adapter

    lora = Lora(rank=3, alpha=5, rslora=True, targets=("model.layers.1.*_proj",))
    weights = first(tiny("qwen3"), lora)
    rng = np.random.default_rng(3)
    for name, array in weights.items():
        weights[name] = rng.normal(0, 0.2, array.shape).astype(np.float32)
    save_adapter(tmp_path, lora, weights, Base(name="tiny", digest=""))
    mlx_adapter.write(tmp_path / "mlx-lm", lora, weights, 2)
    network = load_adapters(load_network(tiny("qwen3"), mx.float32), str(tmp_path / "mlx-lm"))
    network.eval()
    logits = torch.from_numpy(np.array(network(mx.array(tokens()[:, :-1]))))
    ids = torch.from_numpy(tokens()).long()
    theirs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    np.testing.assert_allclose(theirs, peft_logits(tiny("qwen3"), tmp_path), atol=2e-5)
    again = load_adapter(tmp_path / "mlx-lm")
    for name, array in weights.items():
        np.testing.assert_array_equal(again.weights[name], array)
    assert again.scale_of(again.linears[0]) == pytest.approx(lora.scale)
    with pytest.raises(ModelError, match="no place for an adapter of lm_head"):
        mlx_adapter.refuse_unwritable(["model.layers.0.mlp.up_proj", "lm_head"])


@pytest.mark.parametrize(
    ("kind", "dtype", "grid", "close"),
    [
        ("llama", "float32", AFFINE, 1e-4),
        ("gemma3", "float32", A_ROW, 1e-4),
        # A value on the edge between two stored ones falls to either side: a row moves by 0.4 %.
        ("qwen3", "bfloat16", AFFINE, 2e-3),
    ],
)
def test_scales_train_as_in_pytorch(engines, tiny, tmp_path, kind, dtype, grid, close):
    """Losses and what is stored, which computes the last loss; going on has the same bits."""
    dense = transformers.AutoModelForCausalLM.from_pretrained(tiny(kind), dtype=dtype)
    dense.save_pretrained(tmp_path / "dense")
    folder = quantize_folder(tmp_path / "dense", tmp_path / "small", **grid)
    starts = [engines[0], *engines]
    resumed, *trainers = [e.load(folder, "float32").codes_trainer(Train(), 3) for e in starts]
    losses = []
    for number in range(12):
        if number == 6:
            resumed.restore(trainers[0].state())
        batches = [packed(2 * number), packed(2 * number + 1)]
        results = [trainer.step(batches, 5e-3) for trainer in trainers]
        losses.append([result.loss_sum / result.tokens for result in results])
        assert number < 6 or resumed.step(batches, 5e-3) == results[0]
    np.testing.assert_allclose(*np.array(losses).T, atol=close)
    ours, wanted, again = (trainer.weights() for trainer in (*trainers, resumed))
    before = Checkpoint(folder)
    assert ours.keys() == wanted.keys()
    for name, array in ours.items():
        assert not np.array_equal(array, before.read(name)), name
        np.testing.assert_array_equal(array, again[name])
        np.testing.assert_allclose(array, wanted[name], rtol=2**-7, atol=1e-4)
    (tmp_path / "made").mkdir()
    write_model(tmp_path / "made", folder, ours)
    logprobs = engines[0].load(tmp_path / "made", "float32").logprobs(tokens())
    loss, _ = trainers[0].loss(single(tokens()))
    assert loss == pytest.approx(-logprobs.sum(), rel=1e-6)
