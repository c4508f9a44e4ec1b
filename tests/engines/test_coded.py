"""Training on codes: against float64 with gradients passed straight through; what is stored ran."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.tiny_runs import quantize_folder, write_speaking_model

from pippin.data.batches import Batch, Sample, single_batches
from pippin.engines import CodesTrainable
from pippin.engines.coded import dither
from pippin.errors import ModelError
from pippin.model.quantized import DenseView, dense_tensors, dequantize
from pippin.model.weights import Checkpoint
from pippin.quantizers import Codes
from pippin.recipe import Train
from pippin.stages.outcome import write_model

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RATE, STEPS = 2e-2, 3
TRAIN = Train(packing=False, row_tokens=24, batch_rows=4, max_grad_norm=0.5)
KINDS = {"affine": ("bfloat16", "affine", 32), "symmetric": ("float16", "symmetric", 0)}


def _quantized(folder: Path, dtype: str, scheme: str, group: int) -> Path:
    write_speaking_model(folder / "model", dtype, initializer_range=0.15)
    settings = {"bits": 3, "scheme": scheme, "group_size": group, "embed_group_size": 32}
    return quantize_folder(folder / "model", folder / "quantize", **settings)


def _batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    samples = [
        Sample(tokens=rng.integers(2, 250, 24).astype(np.int32), scored=np.arange(24) > 5, row=row)
        for row in range(4)
    ]
    return single_batches(samples, 4)[0]


class Reference:
    """The same training in float64: weights of rounded scales, a gradient as if none was rounded.

    What is added before rounding is taken from the linears; all else is computed here.
    """

    def __init__(self, folder: Path, coded: dict[str, Any]) -> None:
        self.view, self.coded = DenseView(folder), coded
        self.network = transformers.LlamaForCausalLM.from_pretrained(folder.parent / "model")
        self.network.double()
        self.weights = dict(self.network.named_parameters())
        for name, array in dense_tensors(folder):
            self.weights[name].data = torch.from_numpy(np.asarray(array, np.float64))
        self.network.tie_weights()
        self.moves = {
            name: [torch.zeros_like(move).double() for move in linear.moves]
            for name, linear in coded.items()
        }
        every = [move for moves in self.moves.values() for move in moves]
        self.adam = torch.optim.AdamW(every, weight_decay=0.0, foreach=False)

    def step(self, batch: Batch) -> None:
        for name in self.coded:
            codes = self.codes(name)
            dense = dequantize(codes.codes_OI, codes.scales_OG, codes.biases_OG)
            self.weights[f"{name}.weight"].data = torch.from_numpy(dense.astype(np.float64))
        tokens = torch.from_numpy(batch.tokens_BT).long()
        scored = torch.from_numpy(batch.scored_BT[:, 1:])
        logp = self.network(tokens).logits[:, :-1].log_softmax(-1)
        picked = logp.gather(-1, tokens[:, 1:, None])[..., 0]
        self.network.zero_grad()
        (-picked[scored].mean()).backward()
        for name, moves in self.moves.items():
            codes, symmetric = self.view.read_codes(f"{name}.weight"), len(moves) == 1
            groups = moves[0].shape
            pull = self.weights[f"{name}.weight"].grad.reshape(*groups, -1)
            steps = torch.from_numpy(codes.codes_OI.astype(np.float64)).reshape(pull.shape) - 4
            stored = codes.scales_OG[:, : groups[1]].astype(np.float64)
            scale = torch.from_numpy(stored)
            moves[0].grad = scale * (pull * steps).sum(-1)
            if not symmetric:
                moves[1].grad = scale * pull.sum(-1)
        every = [move for moves in self.moves.values() for move in moves]
        torch.nn.utils.clip_grad_norm_(every, TRAIN.max_grad_norm)
        self.adam.param_groups[0]["lr"] = RATE
        self.adam.step()

    def codes(self, name: str) -> Codes:
        """As they are stored after these moves."""
        stored, linear = self.view.read_codes(f"{name}.weight"), self.coded[name]
        kind, moves = stored.scales_OG.dtype, [move.numpy() for move in self.moves[name]]
        groups = moves[0].shape[1]
        scale, bias = (part[:, :groups].astype(np.float64) for part in _grids(stored))
        added = [part.numpy().astype(np.float64) for part in linear.added]
        scales = (scale * (1 + moves[0]) + added[0]).astype(np.float32).astype(kind)
        if len(moves) == 1:
            biases = (-4 * scales.astype(np.float32)).astype(kind)
        else:
            middle = bias + 4 * scale + scale * moves[1]
            biases = (middle - 4 * scale * (1 + moves[0]) + added[1]).astype(np.float32)
        repeats = stored.scales_OG.shape[1] // groups
        grids = [np.repeat(part.astype(kind), repeats, axis=1) for part in (scales, biases)]
        return Codes(codes_OI=stored.codes_OI, scales_OG=grids[0], biases_OG=grids[1])


def _grids(codes: Codes) -> tuple[Any, Any]:
    return codes.scales_OG, codes.biases_OG


@pytest.mark.parametrize("kind", list(KINDS))
def test_updates_equal_those_of_float64_and_what_runs_is_stored(
    engine: Any, tmp_path: Path, kind: str
) -> None:
    folder = _quantized(tmp_path, *KINDS[kind])
    model = engine.load(folder, "float32")
    assert isinstance(model, CodesTrainable)
    trainer = model.codes_trainer(TRAIN, seed=1)
    reference = Reference(folder, trainer.coded)
    for step in range(STEPS):
        trainer.step([_batch(step)], RATE)
        reference.step(_batch(step))
    for name, linear in trainer.coded.items():
        for ours, wanted in zip(linear.moves, reference.moves[name], strict=True):
            assert float((ours.detach() - wanted).norm() / wanted.norm()) < 2e-2, name
    made = tmp_path / "made"
    made.mkdir()
    write_model(made, folder, trainer.weights())
    before, after = Checkpoint(folder), Checkpoint(made)
    grids = DenseView(made)
    for name in trainer.coded:
        for ours, wanted in zip(
            _grids(grids.read_codes(f"{name}.weight")), _grids(reference.codes(name)), strict=True
        ):
            # A value on the edge between two stored ones may fall to either side.
            assert np.mean(ours != wanted) < 0.01, name
    changed = {n for n in before.tensors if not np.array_equal(before.read(n), after.read(n))}
    assert changed == set(trainer.weights())
    batch = _batch(9)
    logprobs = engine.load(made, "float32").logprobs(batch.tokens_BT)
    loss, tokens = trainer.loss(batch)
    assert tokens == batch.scored_BT.sum()
    assert loss == pytest.approx(-logprobs[batch.scored_BT[:, 1:]].sum(), rel=1e-6)


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_tenth_of_a_step_moves_a_tenth_of_the_values(kind: Any) -> None:
    rng = np.random.default_rng(0)
    stored = (rng.choice([-1, 1], 20_000) * rng.uniform(1.01, 1.99, 20_000)).astype(kind)
    added, exact = dither(stored, rng), stored.astype(np.float32)
    np.testing.assert_array_equal((exact + added).astype(kind), stored)
    if kind is np.float32:
        return  # nothing lies between two of them
    step = abs(np.nextafter(stored, np.asarray(8, kind)).astype(np.float32) - exact)
    moved = (exact + 0.1 * step + added).astype(kind).astype(np.float32)
    assert set(np.unique((moved - exact) / step)) == {0.0, 1.0}
    assert np.mean(moved != exact) == pytest.approx(0.1, abs=0.015)


def test_a_dense_folder_has_no_codes_to_train(engine: Any, tmp_path: Path) -> None:
    write_speaking_model(tmp_path / "model")
    with pytest.raises(ModelError, match="no quantized linear") as raised:
        engine.load(tmp_path / "model", "float32").codes_trainer(TRAIN, seed=0)
    assert "less size" in raised.value.hint  # a size that is large enough leaves all dense
