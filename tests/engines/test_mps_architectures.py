"""The table of architectures: large enough, and judged as the versions' operators say."""

import pytest

from pippin.check.audits import Ask
from pippin.engines.torch.mps.architectures import audit_one, load_architectures
from pippin.engines.torch.mps.rules import make_rules

pytestmark = pytest.mark.torch

ARCHITECTURES = {each.name: each for each in load_architectures()}


def audited(name, version=None):
    found = audit_one(ARCHITECTURES[name], make_rules(version), Ask())
    return {each.program: each for each in found}


def test_there_are_enough_of_every_kind():
    assert len(ARCHITECTURES) >= 90
    kinds = {each.inputs for each in ARCHITECTURES.values()}
    assert {"text", "generates", "seq2seq", "image", "boxes", "letters", "patches"} <= kinds


@pytest.mark.parametrize("name", ["bert", "llama", "mamba", "t5", "vit", "wav2vec2-classifier"])
def test_one_of_each_kind_runs(name):
    found = audited(name)
    assert {"float32", "bfloat16", "training"} <= set(found)
    assert all(each.outcome in ("fine", "known wrong") for each in found.values()), found
    assert all(each.calls > 20 for each in found.values())


def test_a_loss_that_mps_got_late():
    """CTC: no kernel in PyTorch 2.13, one in 2.14; the way round says so."""
    old, new = audited("wav2vec2-ctc", "2.13"), audited("wav2vec2-ctc", "2.14")
    assert old["training"].outcome == "fails"
    trouble = old["training"].fails[0]
    assert (trouble.kind, trouble.operator) == ("unsupported", "aten._ctc_loss.Tensor")
    assert trouble.where.startswith("transformers/loss/")
    assert trouble.remedy.startswith("update PyTorch to 2.14")
    assert new["training"].outcome == "fine"
