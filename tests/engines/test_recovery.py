"""Tuned scales and norms: their gradient and their worth, against transformers in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_runs import quantize_folder

from pippin.data.batches import Batch, Sample, single_batches
from pippin.engines import load_engine
from pippin.engines.recovery import Recoverer, Tune
from pippin.model.quantized import DenseView, dense_tensors, dequantize

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
SETTINGS = {"bits": 3, "group_size": 32, "scheme": "affine", "embed_group_size": 32}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in float32."""
    folder = tmp_path_factory.mktemp("parent")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(0)
    samples = [
        Sample(tokens=rng.integers(3, 97, 32).astype(np.int32), scored=np.arange(32) > 0, row=row)
        for row in range(8 * count)
    ]
    return single_batches(samples, 8)


def _exact(folder: Path, weights: dict[str, Any]) -> Any:
    """transformers' model in float64 with these weights."""
    network = transformers.LlamaForCausalLM.from_pretrained(folder).double()
    for name, parameter in network.named_parameters():
        parameter.data = torch.from_numpy(np.asarray(weights[name], np.float64))
    network.tie_weights()
    return network


def _kl(parent: Any, child: Any, batches: list[Batch]) -> Any:
    tokens = torch.from_numpy(np.concatenate([batch.tokens_BT for batch in batches])).long()
    wanted, found = (network(tokens).logits.log_softmax(-1) for network in (parent, child))
    return (wanted.exp() * (wanted - found)).sum(-1).mean()


def _loaded(parent: Path) -> Any:
    return load_engine("torch", "cpu").load(parent, "float32")


@pytest.mark.parametrize(("scheme", "group_size"), [("affine", 32), ("symmetric", 0)])
def test_tuned_scales_predict_more_like_the_parent(
    parent: Path, tmp_path: Path, scheme: str, group_size: int
) -> None:
    """On held-out rows, by float64; nothing but scales, zero points and norms has changed."""
    asked = {**SETTINGS, "scheme": scheme, "group_size": group_size}
    folder = quantize_folder(parent, tmp_path / "q", **asked)
    model, batches = _loaded(parent), _batches(48)
    assert isinstance(model, Recoverer)
    found = model.recover(folder, batches, Tune(fresh=len(batches), seed=1))
    assert found.tokens == 6 * 8 * 32
    before, after = dict(dense_tensors(folder)), dict(dense_tensors(folder))
    view = DenseView(folder)
    norms = {name: found.weights[name] for name in view.tensors if "norm" in name}
    assert len(norms) == 2 * 2 + 1
    for name, norm in norms.items():
        assert 0 < np.abs(norm - before[name]).max() < 0.1
        after[name] = norm
    for name in view.grids:
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in found.weights:
            assert "embed" in name
            continue
        scales, biases = (found.weights[f"{module}.{part}"] for part in ("scales", "biases"))
        codes = view.read_codes(name)
        after[name] = dequantize(codes.codes_OI, scales, biases)
        if scheme == "symmetric":
            np.testing.assert_array_equal(biases, -4 * scales)
        if group_size == 0:
            np.testing.assert_array_equal(scales, np.repeat(scales[:, :1], scales.shape[1], axis=1))
    exact = _exact(parent, dict(dense_tensors(parent)))
    with torch.no_grad():
        kls = [float(_kl(exact, _exact(parent, w), batches[7::8])) for w in (before, after)]
    assert [found.before, found.after] == pytest.approx(kls, rel=1e-3)
    assert kls[1] < 0.993 * kls[0]


def test_gradients_equal_those_of_float64(parent: Path, tmp_path: Path) -> None:
    from pippin.engines.torch.recovery import Recovery

    folder = quantize_folder(parent, tmp_path / "q", **SETTINGS)
    model, batches = _loaded(parent), _batches(1)
    with model._rows(batches) as rows:
        recovery = Recovery(model.network, model._head, rows, folder, seed=0)
        hidden = recovery.hidden(rows[0])
        pull = recovery.pull(hidden.detach(), recovery.wanted[0])[1]
        hidden.backward(pull / len(pull))
    child = _exact(parent, dict(dense_tensors(folder)))
    _kl(_exact(parent, dict(dense_tensors(parent))), child, batches).backward()
    gradients = {name: parameter.grad for name, parameter in child.named_parameters()}
    view = DenseView(folder)
    assert len(recovery.tuned_norms) == 2 * 2 + 1
    for name, norm in recovery.tuned_norms.items():
        by_hand = gradients[name] * norm.size
        assert (norm.move_D.grad - by_hand).norm() < 1e-3 * by_hand.norm(), name
    assert len(recovery.coded) == 2 * 7
    for module, linear in recovery.coded.items():
        codes = view.read_codes(f"{module}.weight")
        scale = torch.from_numpy(codes.scales_OG.astype(np.float64))
        grouped = gradients[f"{module}.weight"].view(*scale.shape, -1)
        steps = torch.from_numpy(codes.codes_OI.astype(np.float64)).view_as(grouped) - 4
        wanted = [scale * (grouped * steps).sum(-1), scale * grouped.sum(-1)]
        for move, by_hand in zip(linear.moves, wanted, strict=True):
            away = (move.grad - by_hand).norm() / by_hand.norm()
            assert away < 1e-3, module


def test_what_cannot_gain_stays_as_it_is(parent: Path, tmp_path: Path) -> None:
    """The parent is what the codes say already."""
    folder = quantize_folder(parent, tmp_path / "q", **SETTINGS)
    network = _exact(parent, dict(dense_tensors(folder))).float()
    network.save_pretrained(tmp_path / "same")
    found = _loaded(tmp_path / "same").recover(folder, _batches(4), Tune(fresh=2, passes=2))
    assert found.tokens == 8 * 32  # one batch, of the fresh ones
    assert found.before < 1e-7
    assert found.weights == {}


@pytest.mark.parametrize("engine", ["torch", pytest.param("mlx", marks=pytest.mark.mlx)])
def test_an_adapter_is_in_the_weights_that_are_kept(
    parent: Path, tmp_path: Path, engine: str
) -> None:
    """Folder and model differ by codes alone, with an update in what has none."""
    peft = pytest.importorskip("peft")
    pytest.importorskip(engine)
    asked = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(parent), asked)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    folder = quantize_folder(tmp_path / "merged", tmp_path / "q", **SETTINGS, keep=("*down_proj*",))
    model = load_engine(engine, "cpu").load(parent, "float32", tmp_path / "adapter")
    found = model.recover(folder, _batches(2), Tune(fresh=2))
    pair = [_exact(parent, dict(dense_tensors(tmp_path / name))) for name in ("merged", "q")]
    with torch.no_grad():
        assert found.before == pytest.approx(float(_kl(*pair, _batches(2)[1:])), rel=1e-3)


def test_norms_are_computed_with_as_their_folder_stores_them(parent: Path, tmp_path: Path) -> None:
    """A network in float32 of a folder in bfloat16; a move too small for a step shifts some."""
    from pippin.engines.torch.recovery import Recovery

    network = transformers.LlamaForCausalLM.from_pretrained(parent, dtype=torch.bfloat16)
    network.model.norm.weight.data.fill_(1.5)
    network.save_pretrained(tmp_path / "half")
    folder = quantize_folder(tmp_path / "half", tmp_path / "q", **SETTINGS)
    model = _loaded(tmp_path / "half")
    with model._rows(_batches(1)) as rows:
        recovery = Recovery(model.network, model._head, rows, folder, seed=0)
    norm = recovery.tuned_norms["model.norm.weight"]
    np.testing.assert_array_equal(norm.stored(), DenseView(folder).read("model.norm.weight"))
    with torch.no_grad():
        norm.move_D += 0.002  # of a size of 1.5, where a step is 0.0078
    stored = norm.stored()
    assert stored.dtype.name == "bfloat16"
    assert 0.2 < (stored > 1.5).mean() < 0.6
    used = model.network.model.norm.weight
    np.testing.assert_array_equal(used.detach().numpy(), stored.astype(np.float32))
