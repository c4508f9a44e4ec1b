"""MPS's rules on a CPU: the table, each kind of offence, and pippin's own programs under them."""

import numpy as np
import pytest
import torch
from tests.targets.tiny_quantized import write_folder
from torch.nn import functional

from pippin.check.audits import Ask
from pippin.engines import Sampling, load_engine
from pippin.engines.torch import mps
from pippin.engines.torch.engine import TorchModel
from pippin.engines.torch.load import load_network
from pippin.engines.torch.loss import Head, head_loss
from pippin.engines.torch.mps import audit
from pippin.engines.torch.mps.known import WHEN, Call, load_rules
from pippin.engines.torch.mps.operators import load_operators
from pippin.engines.torch.mps.rules import make_rules
from pippin.engines.torch.mps.simulator import Simulator
from pippin.engines.torch.mps.verdicts import MpsOffence
from pippin.errors import UsageError
from pippin.recipe import Train

pytestmark = pytest.mark.torch
aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The table is derived anew, into a cache of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPPIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        load_operators.cache_clear()
        yield
        load_operators.cache_clear()


def test_the_table_is_as_large_as_the_registrations_in_apples_library():
    """Counted in the macOS wheels of both releases; the rest of those is what falls back."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("counted for PyTorch 2.13")
    here, later = load_operators(), load_operators("2.14")
    assert (len(here.native), len(later.native)) == (890, 912)
    assert "_ctc_loss" in later.native - here.native
    assert "linalg_svd" in here.fallback - later.fallback


def test_a_version_that_nobody_looked_at():
    with pytest.raises(UsageError, match=r"PyTorch 1\.0 are not known"):
        load_operators("1.0")


@pytest.fixture(scope="module")
def rules(cache):
    return make_rules()


def kinds(simulated):
    return {(o.operator.split(".")[1], o.verdict.kind) for o in simulated.report.offences()}


def test_what_runs_is_no_offence(rules):
    with Simulator(rules) as simulated:
        x = torch.randn(4, 8, device="mps", requires_grad=True)
        layer = torch.nn.Linear(8, 8).to("mps")
        functional.gelu(layer(x)).softmax(-1).square().sum().backward()
        assert x.device == layer.weight.grad.device == torch.device("mps:0")
        assert x.is_mps
        assert not x.cpu().is_mps
    assert kinds(simulated) == set()
    assert simulated.report.calls > 10


def test_numbers_are_the_cpus(rules):
    x = torch.randn(5, 6)
    with Simulator(rules):
        out = functional.layer_norm(x.to("mps"), (6,)).cpu()
    assert torch.equal(out, functional.layer_norm(x, (6,)))


def test_every_kind_of_offence(rules):
    with Simulator(rules) as simulated:
        x = torch.randn(4, 4, device="mps")
        torch.linalg.svd(x)
        torch.linalg.eigh(x)
        x + torch.ones(4, 4)
        x.numpy()
        torch.zeros(3, dtype=torch.float64, device="mps")
        functional.adaptive_avg_pool2d(torch.randn(1, 1, 7, 7, device="mps"), 3)
    found = {offence.verdict.kind for offence in simulated.report.offences()}
    assert found == {"fallback", "unsupported", "mixed", "host", "dtype", "limit"}
    assert all("test_mps.py:" in offence.where for offence in simulated.report.offences())


def test_strict_raises_with_file_and_line(rules):
    with (
        pytest.raises(MpsOffence, match=r"test_mps\.py:\d+: numpy cannot read"),
        Simulator(rules, strict=True),
    ):
        torch.ones(2, device="mps").numpy()


def test_nothing_is_left_behind(rules):
    own = torch.Tensor.device, torch.Generator, torch.autocast.__init__, torch.mps.is_available
    with Simulator(rules):
        assert torch.backends.mps.is_available()
    after = torch.Tensor.device, torch.Generator, torch.autocast.__init__, torch.mps.is_available
    assert after == own
    assert not torch.backends.mps.is_available()


def test_shapes_alone_judge_models_of_any_size(rules):
    with Simulator(rules, base="meta") as simulated:
        weight = torch.empty(200_000, 8192, dtype=torch.bfloat16, device="mps", requires_grad=True)
        hidden = torch.empty(64, 8192, dtype=torch.bfloat16, device="mps", requires_grad=True)
        (hidden @ weight.T).backward(torch.empty(64, 200_000, dtype=torch.bfloat16, device="mps"))
    assert "177116" in simulated.report.known_wrong()[0].verdict.why


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


ATTENTION = aten._scaled_dot_product_attention_math_for_mps.default
# Rule -> a call that has the fault, and its nearest neighbour that has not.
CALLS = {
    "expanded_operand": (
        (aten.mm.default, meta(4, 1).expand(4, 8), meta(8, 4)),
        (aten.mm.default, meta(4, 8), meta(8, 4)),
    ),
    "half_causal_attention": (
        (ATTENTION, *[meta(1, 1, 2, 8)] * 3, None, 0.0, True),
        (ATTENTION, *[meta(1, 1, 2, 8, dtype=torch.float32)] * 3, None, 0.0, True),
    ),
    "half_linear_without_bias": (
        (aten.linear.default, meta(2, 3, 8), meta(4, 8)),
        (aten.linear.default, meta(6, 8), meta(4, 8)),
    ),
    "huge_batched_product": (
        (aten.bmm.default, meta(2, 2**16, 1), meta(2, 1, 2**15 + 1)),
        (aten.bmm.default, meta(2, 2**16, 1), meta(2, 1, 2**15)),
    ),
    "huge_scores": (
        (ATTENTION, *[meta(1, 1, 50_000, 8)] * 3),
        (ATTENTION, *[meta(1, 1, 40_000, 8)] * 3),
    ),
    "huge_table": (
        (aten.embedding.default, meta(2**21, 1025), meta(2, dtype=torch.int64)),
        (aten.embedding.default, meta(2**21, 1024), meta(2, dtype=torch.int64)),
    ),
    "linear_of_many_rows": (
        (aten.linear.default, meta(65537, 1, 8), meta(4, 8), meta(4)),
        (aten.linear.default, meta(65536, 1, 8), meta(4, 8), meta(4)),
    ),
    "long_half_decode": (
        (ATTENTION, meta(1, 1, 1, 8), meta(1, 1, 1024, 8), meta(1, 1, 1024, 8)),
        (ATTENTION, meta(1, 1, 1, 8), meta(1, 1, 1023, 8), meta(1, 1, 1023, 8)),
    ),
    "long_inner_product": (
        (aten.mm.default, meta(16, 32769), meta(32769, 16)),
        (aten.mm.default, meta(15, 32769), meta(32769, 16)),
    ),
    "strided_batch_norm_gradient": (
        (aten.native_batch_norm_backward.default, meta(2, 3, 4), meta(2, 4, 3).mT),
        (aten.native_batch_norm_backward.default, meta(2, 3, 4), meta(2, 3, 4)),
    ),
    "strided_convolution_weight": (
        (aten.convolution.default, meta(1, 2, 5, 5), meta(4, 2, 3, 3).mT),
        (aten.convolution.default, meta(1, 2, 5, 5), meta(4, 2, 3, 3)),
    ),
    "values_of_other_width": (
        (ATTENTION, meta(1, 1, 2, 8), meta(1, 1, 2, 8), meta(1, 1, 2, 4)),
        (ATTENTION, meta(1, 1, 2, 8), meta(1, 1, 2, 8), meta(1, 1, 2, 8)),
    ),
}


@pytest.mark.parametrize("name", WHEN)
def test_known_faults_and_their_neighbours(name):
    (operator, *faulty), (_, *sound) = CALLS[name]
    assert WHEN[name](Call.of(operator, tuple(faulty), {}))
    assert not WHEN[name](Call.of(operator, tuple(sound), {}))


def test_every_rule_has_its_function():
    assert {rule.when for rule in load_rules()} == set(WHEN)
    assert all(rule.remedy and rule.thread.startswith("pytorch#") for rule in load_rules())


def test_rules_end_with_a_version_and_belong_to_chips():
    rule = next(rule for rule in load_rules() if rule.when == "long_inner_product")
    assert rule.holds("2.13.0", "m1")
    assert rule.holds("2.13.0", None)
    assert not rule.holds("2.14.1", "m1")
    assert not rule.holds("2.13.0", "m3")


# A linear without bias over three dimensions in bfloat16 is what every network has; a device probe
# tells an M5 that has the fault. All other rules hold for pippin's own programs.
CHIPS = ("m1", "m2", "m3", "m4")
KINDS = ("llama", "llama_tied", "llama_bias", "gemma2", "gemma3", "qwen3", "gpt_oss")


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_step_generation_and_evaluation_under_strict_rules(tiny, kind):
    for audited in mps.model(tiny(kind), Ask(chip="m1", strict=True, tokens=24)):
        assert audited.outcome == "fine", audited


@pytest.mark.parametrize("chip", CHIPS)
def test_a_large_vocabulary_under_strict_rules(chip):
    """The head's products, whose inner length is the vocabulary in the backward."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*size, generator=generator) for size in ((40, 8), (70_000, 8))]
    with Simulator(make_rules(chip=chip), strict=True):
        hidden = (0.3 * drawn[0]).to("mps").requires_grad_()
        head = Head(weight_VD=drawn[1].to("mps"))
        targets = torch.arange(40, device="mps") * 1000
        head_loss(hidden, targets, head).backward()
        ours = hidden.grad.cpu()
    reference = hidden.detach().cpu().double().requires_grad_()
    logits = reference @ head.weight_VD.cpu().double().T
    functional.cross_entropy(logits, targets.cpu(), reduction="sum").backward()
    assert (ours - reference.grad).abs().max() < 1e-5 * reference.grad.abs().max()


def test_full_training_under_strict_rules(tiny):
    with Simulator(make_rules(), strict=True):
        network = load_network(tiny("llama"), torch.float32, torch.device("cpu")).to("mps")
        train = Train(method="full", row_tokens=24)
        trainer = TorchModel(network, tiny("llama")).trainer(train, None, {}, 0)
        trainer.step([audit._batch(network.config, 24)], 1e-3)
        trainer.restore(trainer.state())
        assert trainer.loss(audit._batch(network.config, 24))[0] > 0


def test_a_quantized_folder_under_strict_rules(tmp_path, rules):
    folder = write_folder(tmp_path)
    prompt = np.array([3, 5, 7], np.int32)
    with Simulator(rules, strict=True):
        network = load_network(folder, torch.float32, torch.device("cpu")).to("mps")
        ours = list(TorchModel(network, folder).generate([prompt], Sampling(max_tokens=4)))
    plain = load_engine("torch", "cpu").load(folder, "float32")
    assert ours == list(plain.generate([prompt], Sampling(max_tokens=4)))
