"""peft and a plain transformers loop as oracles of the torch engine: logits, losses, gradients."""

import numpy as np
import pytest
import torch

peft = pytest.importorskip("peft")

from pippin.data.batches import Batch  # noqa: E402
from pippin.engines import load_engine  # noqa: E402
from pippin.model.adapter import Base, save_adapter  # noqa: E402
from pippin.recipe import Lora, Train  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # asked by peft
]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN = Lora(rank=4, alpha=8, targets=LINEARS)
DORA = Lora(rank=4, alpha=8, targets=LINEARS, dora=True)


@pytest.fixture(scope="module")
def engine():
    torch.set_num_threads(1)
    return load_engine("torch", "cpu")


def peft_model(folder, lora, dtype=torch.float32, seed=0):
    """peft on the plain model, with a live B so that every path carries a signal."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(LINEARS),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(parameter * (1 + drawn) if parameter.dim() == 1 else drawn)
    return model


def pairs(model):
    """peft's adapter under our names."""
    return {
        name.removeprefix("base_model.model.")
        .replace("vector.default.weight", "vector")
        .replace(".default.", "."): p
        for name, p in model.named_parameters()
        if "lora_" in name
    }


def as_weights(model):
    return {name: p.detach().numpy().copy() for name, p in pairs(model).items()}


def samples(count=12):
    rng = np.random.default_rng(9)
    return [rng.integers(3, 97, n).astype(np.int32) for n in rng.integers(4, 14, count)]


def packed(rows):
    tokens = np.concatenate(rows)[None]
    positions = np.concatenate([np.arange(len(r)) for r in rows])[None].astype(np.int32)
    segments = np.concatenate([np.full(len(r), i + 1) for i, r in enumerate(rows)])[None]
    return Batch(
        tokens_BT=tokens,
        positions_BT=positions,
        segments_BT=segments.astype(np.int32),
        scored_BT=positions > 0,
    )


def plain_loss(model, rows):
    """The mean loss of a right-padded batch, as a padding collator and HF's loss make it."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = labels[i, : len(row)] = torch.from_numpy(row).long()
        mask[i, : len(row)] = 1
    return model(input_ids=tokens, attention_mask=mask, labels=labels).loss


def exact_loss(model, row):
    """Summed over one sample in the model's own dtype; transformers' loss rounds to float32."""
    tokens = torch.from_numpy(row[None]).long()
    logits = model(input_ids=tokens).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")


@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen3", "gemma3"])
@pytest.mark.parametrize("switch", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_peft_adapters_give_pefts_logits(kind, switch, tiny, engine, tmp_path):
    model = peft_model(tiny(kind), Lora(rank=4, alpha=8, **switch))
    model.save_pretrained(tmp_path)
    tokens = np.stack([row[:4] for row in samples()])
    with torch.no_grad():
        wanted = model(torch.tensor(tokens).long()).logits.log_softmax(-1)
    ours = engine.load(tiny(kind), "float32", tmp_path).topk(tokens, 97)
    picked = np.take_along_axis(wanted.numpy(), ours.ids_BTK.astype(int), -1)
    np.testing.assert_allclose(ours.logprobs_BTK, picked, atol=1e-5)


@pytest.mark.parametrize("lora", [PLAIN, DORA], ids=["lora", "dora"])
def test_peft_loads_ours_with_the_same_logits(lora, tiny, engine, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = as_weights(peft_model(tiny("llama"), lora))
    save_adapter(tmp_path, lora, weights, Base(name=str(tiny("llama")), digest="0" * 64))
    base = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path)
    tokens = np.stack([row[:4] for row in samples()])
    with torch.no_grad():
        logprobs = theirs(torch.tensor(tokens).long()).logits.log_softmax(-1).numpy()
    wanted = np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None].astype(int), -1)[..., 0]
    ours = engine.load(tiny("llama"), "float32", tmp_path).logprobs(tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("kind", ["llama", "llama_bias", "qwen3"])
@pytest.mark.parametrize("lora", [PLAIN, DORA], ids=["lora", "dora"])
def test_gradients_equal_pefts(kind, lora, dtype, tolerance, tiny, engine):
    rows = samples()
    theirs = peft_model(tiny(kind), lora, dtype)
    total = sum(exact_loss(theirs, row) for row in rows)
    total.backward()
    name = str(dtype).removeprefix("torch.")
    trainer = engine.load(tiny(kind), name).trainer(Train(), lora, as_weights(theirs), 0)
    loss = trainer._backward(packed(rows))
    assert loss.item() == pytest.approx(total.item(), rel=tolerance)
    for key, parameter in pairs(theirs).items():
        scale = parameter.grad.abs().max().item()
        ours = trainer.optimizer.masters[key].grad
        torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("kind", "lora"), [("llama", PLAIN), ("gemma3", PLAIN), ("llama", DORA)])
def test_twenty_four_steps_of_the_plain_recipe(kind, lora, tiny, engine):
    """peft, padded batches and torch's AdamW beside packed rows and ours: equal losses."""
    theirs = peft_model(tiny(kind), lora)
    trainer = engine.load(tiny(kind), "float32").trainer(
        Train(max_grad_norm=1.0, weight_decay=0.01), lora, as_weights(theirs), 0
    )
    trained = [p for p in theirs.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
    rows = samples(72)
    ours, plain = [], []
    for step in range(24):
        batch, rate = rows[3 * step : 3 * step + 3], 5e-3 * (1 - step / 24)
        result = trainer.step([packed(batch[:1]), packed(batch[1:])], rate)
        ours.append(result.loss_sum / result.tokens)
        loss = plain_loss(theirs, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad()
        plain.append(loss.item())
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    assert np.mean(ours[-4:]) < np.mean(ours[:4])
