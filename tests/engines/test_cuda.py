"""On a CUDA device: the same numbers as on the CPU. Skipped where there is none."""

import numpy as np
import pytest
import torch

from pippin.engines import Sampling, load_engine
from pippin.engines.torch import attention
from pippin.engines.torch.rows import packed_rows
from pippin.recipe import Lora, Train

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

KINDS = ["llama", "llama_head100", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"]


@pytest.fixture(scope="module")
def cuda():
    return load_engine("torch", "cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_loss_equals_the_cpus(kind, dtype, tiny, engine, cuda, samples, pack):
    batch = pack([samples[:3], samples[3:]])
    exact = engine.load(tiny(kind), "float32").trainer(Train(), None, {}, 0).loss(batch)[0]
    trainer = cuda.load(tiny(kind), dtype).trainer(Train(), None, {}, 0)
    assert trainer.ability.layout is packed_rows
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert trainer.loss(batch)[0] == pytest.approx(exact, rel=tolerance)


def test_one_kernel_for_all_samples_equals_one_a_sample():
    torch.manual_seed(0)
    shapes = [(1, 4, 40, 100), (1, 2, 40, 100), (1, 2, 40, 100)]
    leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    bounds, results = ((0, 7), (7, 8), (8, 40)), []
    for offsets in (None, torch.tensor([0, 7, 8, 40], dtype=torch.int32, device="cuda")):
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        packing = attention.Packing(bounds=bounds, offsets=offsets)
        for window in (None, 5):
            out, _ = attention.packed_attention(
                torch.nn.Module(), *inputs, None, packing=packing, sliding_window=window
            )
            out.float().pow(2).sum().backward()
            results.append([out.detach(), *(x.grad.clone() for x in inputs)])
            for x in inputs:
                x.grad = None
    for one, many in zip(results[:2], results[2:], strict=True):
        for a, b in zip(one, many, strict=True):
            assert (a - b).abs().max() <= 2e-2 * a.abs().max()


@pytest.mark.parametrize("lora", [Lora(rank=4, dropout=0.2), None])
def test_training_goes_down_and_resumes(lora, tiny, cuda, samples, pack, adapter):
    def start():
        model = cuda.load(tiny("llama"), "bfloat16")
        return model.trainer(Train(), lora, adapter(model) if lora else {}, 0)

    batch, trainer, resumed = [pack([samples])], start(), start()
    losses = [trainer.step(batch, 1e-2).loss_sum for _ in range(6)]
    assert losses[-1] < losses[0]
    resumed.restore(trainer.state())
    ours, theirs = (t.step(batch, 1e-2).loss_sum for t in (trainer, resumed))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_scores_and_tokens_equal_the_cpus(kind, tiny, engine, cuda, samples):
    ours, exact = (e.load(tiny(kind), "float32") for e in (cuda, engine))
    tokens = np.stack([samples[4], samples[4][::-1]])
    np.testing.assert_allclose(ours.logprobs(tokens), exact.logprobs(tokens), atol=1e-3)
    sampling = Sampling(max_tokens=5)
    assert list(ours.generate(samples, sampling)) == list(exact.generate(samples, sampling))


def test_the_figures_are_the_devices(cuda):
    assert cuda.device().startswith("cuda (")
    assert cuda.dtype("auto") == "bfloat16"
    assert cuda.peak_memory() > 0
