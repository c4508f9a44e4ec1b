"""Lowers the decoder for the Vulkan delegate, and says how to run what comes out."""

from typing import Any

import torch
from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
from executorch.exir import EdgeProgramManager

from pippin.targets.agreement import Effort
from pippin.targets.decoder import Weights
from pippin.targets.executorch import lowering
from pippin.targets.executorch.delegated import Delegate
from pippin.targets.executorch.guide import differs
from pippin.targets.executorch.vulkan.parts import VulkanParts
from pippin.targets.gate import Limits
from pippin.targets.guide import Guide


def delegate() -> Delegate:
    """Vulkan: the whole program in one piece, or an error."""
    return Delegate(
        backend="vulkan",
        runtime="nothing here: its program was run in PyTorch before Vulkan's own compiler",
        # The same codes and float32 on both sides; every step expands all of them.
        limits=Limits(
            target="executorch-vulkan",
            max_kl=1e-4,
            min_top1=0.98,
            effort=Effort(stepped=1, whole=False),
        ),
        full_calls=True,
        read_weights=lambda folder, context: Weights(VulkanParts(), folder, context),
        lower=_lower,
        open=None,
        why="no shader of the Vulkan delegate computes it",
        guide=_guide,
    )


def _lower(program: torch.export.ExportedProgram, constants: dict[str, Any]) -> EdgeProgramManager:
    partitioner = VulkanPartitioner({"require_dynamic_shapes": True})
    with lowering.without_idle_passes():
        return lowering.lower(program, constants, partitioner)


def _guide(description: dict[str, Any]) -> Guide:
    version = description["versions"]["executorch"]
    return Guide(
        title="A language model for ExecuTorch on Vulkan",
        about="`model.pte` runs on the GPUs of Android phones through ExecuTorch's Vulkan "
        "delegate, which has the whole model in one piece. The program that the delegate was "
        f"given, run in PyTorch, {differs(description['check'])} The file itself was not run: it "
        "needs Vulkan.",
        run=f"""
## On a phone

Build ExecuTorch {version} with `EXECUTORCH_BUILD_VULKAN`, `EXECUTORCH_BUILD_KERNELS_LLM` and
`EXECUTORCH_BUILD_EXTENSION_LLM_RUNNER` on, then:

```sh
adb push model.pte tokenizer.json llama_main /data/local/tmp
adb shell "cd /data/local/tmp && ./llama_main --model_path=model.pte \\
    --tokenizer_path=tokenizer.json --temperature=0 --prompt='The capital of France is'"
```

In an app use `org.pytorch.executorch.extension.llm.LlmModule`; it takes the two paths. The runner
hands out the text of the token that ends an answer: strip it.
""",
    )
