"""The engine on PyTorch and transformers: any causal language model, on cpu, cuda or mps."""

from typing import TYPE_CHECKING

from pippin.quiet import quiet_imports

if TYPE_CHECKING:
    from pippin.engines.torch.engine import TorchEngine


def make_engine(
    device: str = "auto", remote_code: bool = False, attention: str = "auto"
) -> "TorchEngine":
    """The engine on `auto`, `cpu`, `cuda` or `mps`; UsageError where that device is not there.

    `remote_code` runs the modelling code in a model's folder where its config names some;
    `attention` math computes it in plain products.
    """
    with quiet_imports():
        from pippin.engines.torch.device import pick_device
        from pippin.engines.torch.engine import TorchEngine
        from pippin.engines.torch.unified import UnifiedEngine
    picked = pick_device(device)
    kind = UnifiedEngine if picked.type == "mps" else TorchEngine
    return kind(picked, remote_code, attention)
