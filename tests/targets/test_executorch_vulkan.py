"""A tiny model for ExecuTorch's Vulkan delegate: one piece, the program true to its parent."""

import json

import pytest

from pippin.errors import PippinError
from pippin.recipe import Quantize
from pippin.targets import Bundle, load_target

pytest.importorskip("executorch")
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_the_whole_program_is_one_piece(quantized, tmp_path):
    folder, target = tmp_path / "bundle", load_target("executorch-vulkan")
    folder.mkdir()
    list(target.write(Bundle(quantized=quantized(), folder=folder, context=64)))
    found = json.loads((folder / "deploy.json").read_text())
    report = found["delegation"]
    assert (report["delegate"], report["subgraphs"], report["flops_share"]) == ("vulkan", 1, 1.0)
    assert found["check"]["max_difference"] < 1e-3
    assert found["check"]["greedy_equal"] == found["check"]["greedy_tokens"]
    # Codes of four bits are multiplied as they are, never expanded.
    assert shaders(folder / "model.pte").count("et_vk.linear_q4gsw.default") == 2 * 7
    with pytest.raises(PippinError, match="a device with vulkan only"):
        target.load(folder)


def shaders(path):
    from executorch.backends.vulkan.serialization.vulkan_graph_serialize import (
        extract_vk_flatbuffer,
        flatbuffer_to_vk_graph,
    )
    from executorch.exir._serialize._program import _extract_delegate_payload

    payload = _extract_delegate_payload(path.read_bytes(), "VulkanBackend")
    return [call.name for call in flatbuffer_to_vk_graph(extract_vk_flatbuffer(payload)).chain]


def test_linears_of_eight_bits_are_refused(quantized):
    asked = Quantize(bits=8, group_size=0, scheme="symmetric", embed_scheme="symmetric")
    message, hint = load_target("executorch-vulkan").refusal(asked, quantized())
    assert "Vulkan multiplies 4-bit codes" in message
    assert hint == "set quantize.bits = 4"
