"""The exportable decoder computes what transformers computes from the same dequantized weights."""

import itertools
import json

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, KINDS, LINEAR, usual

from pippin.errors import ModelError
from pippin.model.quantized import DenseView, dense_tensors
from pippin.quantizers import Grid
from pippin.targets.folder import Folder

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
pytestmark = pytest.mark.executorch


@pytest.fixture(autouse=True)
def exact_activations(monkeypatch):
    """Without rounding of activations the two programs are the same function."""
    from pippin.targets.executorch import parts

    monkeypatch.setattr(parts, "fake_quantize", lambda x: x)


def peer_logits(folder, ids):
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    raw.pop("quantization")
    config = transformers.AutoConfig.for_model(**raw)
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {k: torch.from_numpy(np.array(v, np.float32)) for k, v in dense_tensors(folder)}
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    peer.tie_weights()
    with torch.no_grad():
        return peer(ids).logits[0]


def our_logits(folder, ids, cuts=()):
    from pippin.targets.decoder import Decoder
    from pippin.targets.executorch.parts import read_weights
    from pippin.targets.folder import Folder

    program = Decoder(read_weights(Folder(folder), 64), every=True)
    bounds = [0, *cuts, ids.shape[1]]
    with torch.no_grad():
        parts = [program(ids[:, a:b], torch.tensor([a])) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, 1)[0]


@pytest.mark.parametrize("kind", [*sorted(KINDS), "gemma3", "gemma3_short", "mistral"])
def test_logits_are_those_of_transformers(quantized, kind):
    folder, ids = quantized(kind), torch.arange(40)[None] * 7 % 320
    torch.testing.assert_close(
        our_logits(folder, ids), peer_logits(folder, ids), atol=1e-4, rtol=1e-4
    )


def test_decode_continues_prefill(quantized):
    folder, ids = quantized(), torch.arange(20)[None] * 7 % 320
    whole, cut = our_logits(folder, ids), our_logits(folder, ids, cuts=(5, 6, 7, 15))
    torch.testing.assert_close(whole, cut, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "choose",
    [
        lambda module: None,
        lambda module: None if "mlp" in module else usual(module),
        lambda module: LINEAR,
        lambda module: CHANNEL,
        lambda module: Grid(bits=4, group_size=32, symmetric=True, per_channel=True),
    ],
    ids=["dense", "dense mlp", "int4 embedding", "int8 linears", "int4 channels"],
)
def test_other_grids_are_read_exactly(quantized, choose):
    folder, ids = quantized("llama", choose), torch.arange(9)[None]
    torch.testing.assert_close(
        our_logits(folder, ids), peer_logits(folder, ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("grid", [LINEAR, CHANNEL])
def test_what_the_file_holds_expands_to_the_quantized_weights_bit_for_bit(quantized, grid):
    from pippin.targets.executorch.folder import linear_codes

    place, name = quantized("llama", lambda module: grid), "model.layers.1.mlp.gate_proj"
    found = linear_codes(Folder(place), name)
    groups_OGS = found.codes_OD.float().unflatten(-1, (found.scales_OG.shape[-1], -1))
    made = (groups_OGS * found.scales_OG[..., None]).flatten(-2).numpy()
    np.testing.assert_array_equal(made, DenseView(place).read(f"{name}.weight"))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Grid(bits=4, group_size=32, symmetric=False), "zero points"),
        (Grid(bits=8, group_size=32, symmetric=True), "one scale a channel"),
        (Grid(bits=3, group_size=32, symmetric=True), "3-bit"),
    ],
)
def test_codes_that_do_not_fit_are_an_error(quantized, grid, message):
    with pytest.raises(ModelError, match=message):
        our_logits(quantized("llama", lambda module: grid), torch.zeros((1, 1), dtype=torch.long))
