"""The decoder as XNNPACK's stretches between two caches, and the small program around them.

Stretches that differ in nothing but their weights are traced once, and compiled with each one's.

Shape letters: B batch (1), T tokens, D hidden, H heads, C head channels, V vocab.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge
from executorch.exir.backend.backend_api import to_backend
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from pippin.targets.decoder import Decoder, Layer, Weights
from pippin.targets.executorch import lowering

# With this spec the backend runs one of its seventeen rewriting passes. Each of them traces the
# stretch again, and none finds anything to change in the forms of layers.py.
_SPECS = [CompileSpec("dqlinear_partitioner", b"")]
_EXAMPLE = 3  # tokens of a traced call


class First(nn.Module):
    """From a token's vector to the first cache."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> tuple[Tensor, ...]:
        """See Layer.before."""
        return self.layer.before(x_BTD, (cos_BT1C, sin_BT1C))


class Between(nn.Module):
    """From a layer's cache to the next one's."""

    def __init__(self, layer: Layer, following: Layer):
        super().__init__()
        self.layer, self.following = layer, following

    def forward(
        self, x_BTD: Tensor, mixed_BTHC: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor
    ) -> tuple[Tensor, ...]:
        """The layer's output, then what goes into the next cache."""
        x_BTD = self.layer.after(x_BTD, mixed_BTHC)
        return x_BTD, *self.following.before(x_BTD, (cos_BT1C, sin_BT1C))


class Last(nn.Module):
    """From the last cache to logits."""

    def __init__(self, layer: Layer, ending: nn.Module):
        super().__init__()
        self.layer, self.ending = layer, ending

    def forward(self, x_BTD: Tensor, mixed_BTHC: Tensor) -> tuple[Tensor, ...]:
        """(B, T, V)."""
        return (self.ending(self.layer.after(x_BTD, mixed_BTHC)),)


def cut(weights: Weights) -> list[nn.Module]:
    """The stretches in order."""
    layers: list[Layer] = list(weights.layers)
    between = itertools.starmap(Between, itertools.pairwise(layers))
    return [First(layers[0]), *between, Last(layers[-1], weights.exit)]


@torch.library.custom_op("pippin::stretch", mutates_args=())
def stretch(given: list[Tensor], number: int, sizes: list[int], ranks: list[int]) -> list[Tensor]:
    """The call of a stretch while the program around them is traced.

    Its results have the shapes (1, T, ..) whose ends stand one behind the other in `sizes`.
    """
    raise AssertionError("a stretch is never run in PyTorch")


@stretch.register_fake
def _(given: list[Tensor], number: int, sizes: list[int], ranks: list[int]) -> list[Tensor]:
    left, length = iter(sizes), given[0].shape[1]
    return [given[0].new_empty(1, length, *itertools.islice(left, rank)) for rank in ranks]


class Around(nn.Module):
    """The decoder whose stretches are calls by number."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.entry, self.caches = decoder.weights.entry, decoder.caches
        self.shape = decoder.weights.shape

    def forward(self, tokens_BT: Tensor, input_pos: Tensor) -> Tensor:
        """The last token's logits, (1, V); see Decoder."""
        shape = self.shape
        heads = [(n, shape.head_dim) for n in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        x_BTD, where = self.entry(tokens_BT, input_pos)
        placed = _call(0, [x_BTD, *where[0][0]], heads)
        for number, cache in enumerate(self.caches, 1):
            mixed_BTHC = cache(*placed, where[number - 1][1])
            if number < shape.num_layers:
                given = [x_BTD, mixed_BTHC, *where[number][0]]
                x_BTD, *placed = _call(number, given, [x_BTD.shape[2:], *heads])
        last = [x_BTD[:, -1:], mixed_BTHC[:, -1:]]
        (logits_BTV,) = _call(shape.num_layers, last, [(shape.vocab_size,)])
        return logits_BTV.view(1, -1)


def lower(weights: Weights, constants: dict[str, Any]) -> EdgeProgramManager:
    """The program with every stretch given to XNNPACK; `constants` become methods beside it."""
    context, config = weights.shape.context, _config()
    around = lowering.export(Around(Decoder(weights, every=False)), context)
    parts = cut(weights)
    traced: dict[Hashable, ExportedProgram] = {}
    with lowering.tracing(), lowering.without_idle_passes():
        program = to_edge(around, compile_config=config).exported_program()
        module = program.graph_module
        for node in list(_calls(module)):
            given, number = _arguments(node)
            part = parts[number]
            kind = _kind(part)
            if kind not in traced:
                traced[kind] = _trace(part, given, context)
            name = f"stretch_{number}"
            module.add_module(name, _compile(traced[kind], part))
            with module.graph.inserting_before(node):
                attribute = module.graph.get_attr(name)
            node.target, node.args = executorch_call_delegate, (attribute, *given)
        module.recompile()
        return EdgeProgramManager(program, constants, config)


def why(operator: str) -> str:
    """What keeps an operator outside."""
    known = {
        name.removesuffix(".default") for name in XnnpackPartitioner().target_partitioner_configs
    }
    if operator.removeprefix("aten.") in known:
        return "not in this form: XNNPACK has it for fixed sizes and floats only"
    return "no such operator in XNNPACK"


def _call(number: int, given: list[Tensor], ends: Sequence[Sequence[int]]) -> list[Tensor]:
    return stretch(given, number, [size for end in ends for size in end], [len(e) for e in ends])


def _calls(module: torch.fx.GraphModule) -> Iterator[Node]:
    named = ((node, str(node.target)) for node in module.graph.nodes)
    return (node for node, name in named if "pippin.stretch" in name)


def _arguments(node: Node) -> tuple[list[Node], int]:
    given, number, *_ = node.args
    return cast("list[Node]", given), cast("int", number)


def _config(**more: Any) -> EdgeCompileConfig:
    return EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True, **more)


def _kind(part: nn.Module) -> Hashable:
    """What two stretches have in common that differ in nothing but numbers."""
    buffers = part.named_buffers(remove_duplicate=False)
    shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in buffers)
    return type(part), shapes, tuple(getattr(module, "bits", 0) for module in part.modules())


def _trace(part: nn.Module, given: Sequence[Node], context: int) -> ExportedProgram:
    """The stretch for such inputs, in the operators that XNNPACK reads."""
    length = torch.export.Dim("length", min=1, max=context)
    shapes = [node.meta["val"].shape for node in given]
    grows = [isinstance(shape[1], torch.SymInt) for shape in shapes]
    example = tuple(
        torch.zeros(1, _EXAMPLE if grown else 1, *shape[2:])
        for shape, grown in zip(shapes, grows, strict=True)
    )
    dynamic = tuple({1: length} if grown else None for grown in grows)
    program = torch.export.export(part, example, dynamic_shapes=dynamic, strict=False)
    partitioner = XnnpackPartitioner()
    kept, _ = partitioner.ops_to_not_decompose(program)
    traced = to_edge(program, compile_config=_config(preserve_ops=kept)).exported_program()
    # XNNPACK's own rules, which also mark what belongs to a linear of rounded activations.
    taken = {node for group in partitioner.get_matched_nodes_from_configs(traced) for node in group}
    left = [node for node in traced.graph.nodes if node.op == "call_function" and node not in taken]
    assert not left, left
    return traced


def _compile(traced: ExportedProgram, part: nn.Module) -> LoweredBackendModule:
    """A traced stretch with this one's weights, as XNNPACK has it."""
    own = dict(part.named_buffers(remove_duplicate=False))
    assert own.keys() <= traced.state_dict.keys(), own.keys() - traced.state_dict.keys()
    program = ExportedProgram(
        root=traced.graph_module,
        graph=traced.graph,
        graph_signature=traced.graph_signature,
        state_dict=traced.state_dict | own,
        range_constraints=traced.range_constraints,
        module_call_graph=traced.module_call_graph,
        constants=traced.constants,
        verifiers=[traced.verifier],
    )
    return to_backend(XnnpackBackend.__name__, program, _SPECS)
