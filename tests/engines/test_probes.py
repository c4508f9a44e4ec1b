"""Every probe of the torch engine passes on this CPU, and fails where its fault is put in."""

import pytest
import torch
from tests.engines import faults
from tests.engines.faults import Fault, patched
from torch.nn.attention import SDPBackend, sdpa_kernel

from pippin.check import Shapes
from pippin.check.judge import judge
from pippin.engines.torch import probes

pytestmark = pytest.mark.torch

SHAPES = Shapes(tokens=300, length=40, vocab=1000, heads=4, kv_heads=2, head_dim=64)
SDPA = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math"
PRODUCTS = "mm addmm bmm baddbmm"
RAND = torch.rand


def fault(name: str, change):
    """A fault of one operator or several."""
    return lambda: Fault(name, change)


# Probe without its dtype -> what is broken for it.
FAULTS = {
    "attention.causal": fault(SDPA, faults.leaking),
    "attention.causality": fault(SDPA, faults.leaking),
    "attention.padded": fault(SDPA, faults.deaf_to_masks),
    "attention.grouped heads": fault(SDPA, faults.heads_mixed),
    "attention.window": fault(SDPA, faults.deaf_to_masks),
    "attention.decode": fault(SDPA, faults.reading_on),
    "attention.masked rows": fault(SDPA, faults.blind_nan),
    "attention.gradients": fault(
        "_scaled_dot_product_flash_attention_for_cpu_backward", faults.scaled
    ),
    "attention.plain products": fault(PRODUCTS, faults.tail_lost),
    "attention.memory, inference": lambda: sdpa_kernel(SDPBackend.MATH),
    "attention.memory, training": lambda: sdpa_kernel(SDPBackend.MATH),
    "product.plain": fault(PRODUCTS, faults.tail_lost),
    "product.long inner": fault(PRODUCTS, faults.long_inner),
    "product.batched inner": fault(PRODUCTS, faults.long_inner),
    "product.vocabulary": fault(PRODUCTS, faults.tail_lost),
    "product.repeated": fault(PRODUCTS, faults.unsteady),
    "product.many rows": fault(f"{PRODUCTS} add", faults.tail_lost),
    "product.layouts": fault(PRODUCTS, faults.tail_lost),
    "gradient.head weight": fault(PRODUCTS, faults.long_inner),
    "gradient.head input": fault(PRODUCTS, faults.long_inner),
    "gradient.block": fault("silu_backward", faults.scaled),
    "gradient.norm": fault("_foreach_norm", faults.tail_lost),
    "loss.cross-entropy": fault("_log_softmax_backward_data", faults.scaled),
    "loss.own": lambda: faults.both(
        patched("pippin.engines.torch.cpu_products.ours", lambda _: False),
        Fault(PRODUCTS, faults.tail_lost),
    ),
    "optimizer.step": fault("_fused_adamw_", faults.update_lost),
    "optimizer.layouts": fault("_fused_adamw_", faults.update_lost),
    "quantized.int8 weights": fault("_weight_int8pack_mm", faults.scaled),
    "quantized.int4 weights": fault("_weight_int4pack_mm_for_cpu", faults.scaled),
    "quantized.dequantized": fault("mul", faults.tail_lost),
    "quantized.integers": fault("_int_mm", faults.one_more),
    "quantized.unpacking": fault("__rshift__", faults.one_more),
    "quantized.float8": fault("_to_copy", faults.tail_lost),
    "index.lookup": fault("index_select", faults.tail_lost),
    "index.lookup gradient": fault("embedding_dense_backward", faults.tail_lost),
    "index.added": fault("scatter_add", faults.scaled),
    "index.written": fault("index_copy", faults.tail_lost),
    "index.gathered": fault("gather", faults.tail_lost),
    "index.out of range": fault("embedding", faults.clamped),
    "rounding.bfloat16": fault("_to_copy", faults.truncating),
    "rounding.float16": fault("_to_copy", faults.truncating),
    "function.elementwise": fault("rsqrt", faults.scaled),
    "function.rotation": fault("cos", faults.scaled),
    "function.softmax": fault("_softmax", faults.tail_lost),
    "function.norm": fault("native_layer_norm", faults.tail_lost),
    "sum.many": fault("cumsum", faults.tail_lost),
    "sum.repeated": fault("sum", faults.unsteady),
    "order.vocabulary": fault("argmax", faults.one_more),
    "copy.transfers": fault("clone", faults.tail_lost),
    "copy.joins": fault("cat", faults.tail_lost),
    "autocast.bfloat16": lambda: patched("torch.autocast", faults.no_autocast),
    "random.reproducible": lambda: patched("torch.manual_seed", lambda _: None),
    "random.independent": lambda: patched(
        "torch.rand", lambda *size, device=None: torch.linspace(0, 1, *size)
    ),
    "random.distribution": fault("rand", faults.scaled),
    "random.dropout": fault("native_dropout_backward mul", faults.tail_lost),
    "network.logits": fault(PRODUCTS, faults.tail_lost),
    "network.gradients": fault("silu_backward", faults.scaled),
    "network.decoding": fault(SDPA, faults.blind_nan),
    "network.greedy": fault("argmax", faults.one_more),
    "network.update": fault("_fused_adamw_", faults.update_lost),
    "compile.parity": lambda: patched("torch.compile", faults.compiled_wrongly),
}


def family(name: str) -> str:
    """The probe's name without its dtype."""
    stem, _, last = name.rpartition(".")
    return stem if last in ("float32", "float16", "bfloat16") and "." in stem else name


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


PROBES = {probe.name: probe for probe in probes.probes("cpu", SHAPES)}


def test_there_are_enough():
    assert len(PROBES) >= 30
    assert {family(name) for name in PROBES} == set(FAULTS)


@pytest.mark.parametrize("name", PROBES)
def test_a_fault_is_found(name):
    probe = PROBES[name]
    faults.unsteady.calls = 0
    with FAULTS[family(name)]():
        found = judge(probe)
    assert found.verdict in ("wrong", "inaccurate"), found
    assert found.remedy == probe.remedy
    if not name.startswith("compile."):  # takes a compiler and its time: see the slow test below
        assert judge(probe).verdict == "pass"


@pytest.mark.slow
def test_compiled_code_agrees():
    assert judge(PROBES["compile.parity.float32"]).verdict in ("pass", "not there")
