"""The loss by our kernels beside PyTorch's operators, once before a training uses them.

Shape letters: S positions, D hidden.
"""

from dataclasses import replace

import torch

from pippin.engines.torch.loss import Head, by_kernel, head_loss
from pippin.engines.torch.trial import Difference, difference

TRIED = 16  # positions
TOLERANCES = {torch.float32: 1e-4}  # others round every product they keep


def tried(head: Head) -> tuple[Head, Difference | None]:
    """The head, made a plain one where loss or gradient differ on drawn positions, and how."""
    if not by_kernel(head):
        return head, None
    weight_VD, plain = head.weight_VD, replace(head, plain=True)
    device, generator = weight_VD.device, torch.Generator(weight_VD.device).manual_seed(0)
    shape = TRIED, weight_VD.shape[1]
    hidden_SD = torch.randn(shape, generator=generator, device=device).to(weight_VD.dtype)
    targets_S = torch.randint(len(weight_VD), (TRIED,), generator=generator, device=device)
    found = []
    for one in (plain, head):
        leaf_SD = hidden_SD.clone().requires_grad_()
        loss = head_loss(leaf_SD, targets_S, one)
        grad_SD = torch.autograd.grad(loss, leaf_SD)[0]
        found.append({"the sum": loss.detach(), "the gradient": grad_SD})
    tolerance = TOLERANCES.get(weight_VD.dtype, 1e-2)
    fault = difference(*found, tolerance, "the loss")
    return (plain if fault else head), fault
