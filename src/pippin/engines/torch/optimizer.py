"""AdamW on float32 masters: clipped, refused where not finite, checked to have moved weights."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pippin.engines.arrays import find_saved, refuse_stuck
from pippin.errors import ModelError
from pippin.recipe import Train

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Owns the masters of the trainable tensors.

    A parameter in float32 (or float64) is its own master. One in bfloat16 or float16 gets a
    float32 master that collects its gradients, takes the update, and is rounded back into it.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], train: Train) -> None:
        self.parameters = parameters
        self.masters = {name: _master(p) for name, p in parameters.items()}
        self.adam = torch.optim.AdamW(
            list(self.masters.values()),
            lr=0.0,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
        self.updates = 0
        self._unmoved = set(parameters)
        self._checks = 0

    def grad_norm(self) -> Tensor:
        """The norm of the summed gradients of all masters, a scalar on the device."""
        return torch.nn.utils.get_total_norm(self._grads())

    def update(self, learning_rate: float, factor: Tensor, broken: Tensor | None = None) -> None:
        """One AdamW update with the gradients times `factor`, a scalar on the device.

        Where `broken` is 1.0 on a CUDA device nothing moves: the host need not wait to decide, and
        tells later by `take_back`. Raises ModelError where a tensor did not move in the first two
        updates.
        """
        torch._foreach_mul_(self._grads(), factor)
        self.adam.param_groups[0]["lr"] = learning_rate
        self.adam.found_inf = broken  # ty: ignore[missing-attribute]
        watched = self._watch() if self._unmoved and learning_rate > 0 else {}
        self.adam.step()
        self._round_back()
        self.drop_gradients()
        self.updates += 1
        if watched and (broken is None or not bool(broken)):
            self._check(watched)

    def take_back(self) -> None:
        """The last update was a broken one."""
        self.updates -= 1

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, NDArray[Any]]:
        """Masters and moments on the host, in their own precision, and the count of updates."""
        out = {f"weights.{name}": _numpy(master) for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for moment in MOMENTS if self.updates else ():
                out[f"{moment}.{name}"] = _numpy(self.adam.state[master][moment])
        out["updates"] = np.array([self.updates], np.int64)
        return out

    def restore(self, state: dict[str, NDArray[Any]]) -> None:
        """Take up what `state` returned."""
        self.updates = int(state["updates"][0])
        for name, master in self.masters.items():
            _copy(master, state, f"weights.{name}")
            if self.updates:
                self.adam.state[master] = self._moments(master, state, name)
        self._unmoved = self._unmoved if self.updates < 2 else set()
        self._round_back()

    def _moments(self, master: Tensor, state: dict[str, Any], name: str) -> dict[str, Tensor]:
        step = torch.tensor(float(self.updates), dtype=torch.float32)
        moments = {"step": step.to(master.device) if master.device.type != "cpu" else step}
        for moment in MOMENTS:
            moments[moment] = torch.zeros_like(master)
            _copy(moments[moment], state, f"{moment}.{name}")
        return moments

    def _grads(self) -> list[Tensor]:
        for name, master in self.masters.items():
            if master.grad is None:
                raise ModelError(
                    f"{name} has no gradient: the loss does not depend on it",
                    "leave it out of lora.targets, or train with method = lora",
                )
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def _round_back(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def _watch(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By tensor that has not moved yet: the place of its largest gradient, the value there."""
        watched = {}
        for name in self._unmoved:
            grad = self.masters[name].grad
            assert grad is not None
            place = grad.abs().argmax()
            watched[name] = place, self.masters[name].detach().view(-1)[place].clone()
        return watched

    def _check(self, watched: dict[str, tuple[Tensor, Tensor]]) -> None:
        still = {
            name
            for name, (place, before) in watched.items()
            if bool(self.masters[name].detach().view(-1)[place] == before)
        }
        self._unmoved, self._checks = still, self._checks + 1
        refuse_stuck(still, self.updates, first=self._checks == 1)


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def collect(_: Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.float()
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(collect)
    return master


def _copy(target: Tensor, state: dict[str, NDArray[Any]], key: str) -> None:
    array = find_saved(state, key, tuple(target.shape))
    with torch.no_grad():
        target.copy_(torch.tensor(array))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy().copy()
