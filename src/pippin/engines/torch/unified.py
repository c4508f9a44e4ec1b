"""The engine where the GPU shares the machine's memory: what its driver has given is watched."""

import torch

from pippin.engines.torch.engine import TorchEngine

CROWDED = 0.9  # of the driver's recommendation; above it cached blocks are given back


class UnifiedEngine(TorchEngine):
    """PyTorch on MPS."""

    def driver_memory(self) -> tuple[int, int]:
        """Bytes that the driver has given this process, and that it recommends to take.

        PyTorch keeps freed blocks of every size it has met; near the limit they are given back.
        """
        recommended = torch.mps.recommended_max_memory()
        if torch.mps.driver_allocated_memory() > CROWDED * recommended:
            torch.mps.empty_cache()
        return torch.mps.driver_allocated_memory(), recommended
