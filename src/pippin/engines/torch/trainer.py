"""Training on one device: exact packed rows, loss on scored positions, AdamW in float32.

Shape letters: B rows, T tokens, S scored positions, D hidden, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pippin.data.batches import Batch, without_unread
from pippin.data.beginnings import share_beginnings
from pippin.engines import StepResult, Weights
from pippin.engines.books import scored_tokens, seed_of
from pippin.engines.torch import cpu_kernels, cpu_products
from pippin.engines.torch.body import find_head, hidden_states
from pippin.engines.torch.by_hand import replace_layers
from pippin.engines.torch.compiled import compile_layers, wake_autograd
from pippin.engines.torch.float8 import freeze_in_float8, refuse_old
from pippin.engines.torch.fused import fuse
from pippin.engines.torch.loss import head_loss, logits_loss
from pippin.engines.torch.loss_trial import tried
from pippin.engines.torch.optimizer import Optimizer
from pippin.engines.torch.probe import find_ability
from pippin.engines.torch.recomputed import checkpoint_activations
from pippin.engines.torch.rows import Rows
from pippin.engines.torch.trial import Difference, decoder_layers, outside
from pippin.errors import ModelError
from pippin.recipe import Train


class TorchTrainer:
    """Trains `trainable`, by checkpoint name, of a network that it takes over.

    `notices` tells what was replaced by something slower. Raises ModelError where samples cannot
    share a row exactly and `train.packing` asks for it.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        trainable: dict[str, nn.Parameter],
        train: Train,
        seed: int,
    ) -> None:
        self.network, self.trainable, self.train, self.seed = network, trainable, train, seed
        self.head, self.ability = find_head(network), find_ability(network)
        self.shares = self.ability.shares
        self.notices = self._notices()
        self.steps = 0
        self.goes_ahead = network.device.type == "cuda"
        self._ahead: tuple[Batch, Tensor] | None = None
        if train.packing and not self.ability.packs:
            raise ModelError(
                f"{type(network).__name__} cannot keep packed samples apart",
                "set train.packing = false",
            )
        network.requires_grad_(False)
        for parameter in trainable.values():
            parameter.requires_grad_(True)
        if train.frozen_dtype == "float8":
            refuse_old(network.device)
        if train.recomputed:
            checkpoint_activations(network, train.recomputed)
        self.by_hand = self._replace_layers()
        self.compiled = not self.by_hand and self._compile()
        if self.by_hand:
            fuse(outside(network))
        elif not self.compiled:
            fuse(network.modules())
        self.optimizer = Optimizer(trainable, train)

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        upcoming: Callable[[], Sequence[Batch]] = tuple,
    ) -> StepResult:
        """One AdamW update over the micro-batches, each scored token weighing the same.

        On CUDA the device is at the next update's first micro-batch by the time this one's figures
        are told: from step to step it does not wait for the host.
        """
        tokens = scored_tokens(batches)
        if not self.network.training:
            self.network.train()
        losses = self._losses(batches)
        self.steps += 1
        found = torch.stack(losses).sum(), self.optimizer.grad_norm() / tokens
        loss_sum, norm = self._update(found, learning_rate, tokens, upcoming)
        return StepResult(loss_sum=loss_sum, tokens=tokens, grad_norm=norm)

    def _losses(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Of every micro-batch, whose gradients are summed; the first may be there already."""
        ahead, self._ahead = self._ahead, None
        if ahead and ahead[0] is not batches[0]:
            self.optimizer.drop_gradients()
        done = [ahead[1]] if ahead and ahead[0] is batches[0] else []
        rest = [self._backward(batches[i], i) for i in range(len(done), len(batches))]
        return done + rest

    def _update(
        self,
        found: tuple[Tensor, Tensor],
        learning_rate: float,
        tokens: int,
        upcoming: Callable[[], Sequence[Batch]],
    ) -> list[float]:
        """Summed loss and gradient norm; no update where one is not finite.

        Where the host goes ahead the device decides by itself, and the host tells later.
        """
        factor, arrived = self._clip(found[1]) / tokens, _to_host(*found)
        if self.goes_ahead:
            broken = (~torch.stack([x.isfinite() for x in found]).all()).float()
            self.optimizer.update(learning_rate, factor, broken)
            first = next(iter(upcoming()), None)
            self._ahead = (first, self._backward(first, 0)) if first else None
            values = arrived()
            if not all(map(math.isfinite, values)):
                self.optimizer.take_back()
            return values
        values = arrived()
        if all(map(math.isfinite, values)):
            self.optimizer.update(learning_rate, factor)
        else:
            self.optimizer.drop_gradients()
        return values

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[float, int]:
        """Summed loss in nats and count of scored tokens; no gradient, dropout off."""
        self.network.eval()
        with _eager(self.compiled):
            self._refuse_long(batch)
            rows = self.ability.layout(batch, self.network.device)
            return self._loss(rows).item(), batch.scored_tokens

    def weights(self) -> Weights:
        """The trainable tensors in float32 on the host, by checkpoint name."""
        masters = self.optimizer.masters
        return {name: m.detach().float().cpu().numpy().copy() for name, m in masters.items()}

    def state(self) -> Weights:
        """Masters, moments and counters. Random choices follow from seed and step number."""
        return {**self.optimizer.state(), "steps": np.array([self.steps], np.int64)}

    def restore(self, state: Weights) -> None:
        """Take up a state that `state` returned."""
        self._ahead = None
        self.optimizer.drop_gradients()
        self.optimizer.restore(state)
        self.steps = int(state["steps"][0])

    def _replace_layers(self) -> bool:
        """Whether the layers run as our own code, which takes micro-batches of any shape."""
        if self.network.device.type == "mps":
            return False
        on_cpu, float8 = self.network.device.type == "cpu", self.train.frozen_dtype == "float8"
        if not on_cpu:
            wake_autograd(self.network.device)
        fault = replace_layers(self.network, self.ability, self.train)
        if isinstance(fault, Difference) or (on_cpu and fault and fault == cpu_kernels.missing()):
            self.notices += (f"layers have no kernels of ours, which is slower: {fault}",)
        if float8 and fault:
            self.notices += (freeze_in_float8(decoder_layers(self.network)),)
        elif float8:
            self.notices += ("the layers' frozen linears compute in FP8, which is less exact",)
        return fault is None

    def _compile(self) -> bool:
        """Whether the layers run as compiled code, for micro-batches of the recipe's shape."""
        if self.network.device.type != "cuda" or not self.train.compile:
            return False
        fault = compile_layers(self.network, self.ability.layout, self.train)
        if fault:
            self.notices += (f"layers are not compiled, which is slower: {fault}",)
        return fault is None

    def _backward(self, batch: Batch, number: int = 0) -> Tensor:
        """The loss of the next step's micro-batch `number`, whose gradients are added."""
        rows = self._lay_out(batch)
        plain = rows.tokens_BT.numel() != self.train.batch_rows * self.train.row_tokens
        seed = seed_of(self.seed, self.steps, number)
        with _eager(self.compiled and plain), _seeded(seed, self.network.device):
            loss = self._loss(rows)
            loss.backward()
        return loss.detach()

    def _lay_out(self, batch: Batch) -> Rows:
        self._refuse_long(batch)
        if self.compiled or self.network.device.type == "mps":  # one shape for all micro-batches
            batch = _filled(batch, self.train)
        if self.network.device.type == "cpu":
            batch = without_unread(batch)
        if self.shares:
            batch = share_beginnings(batch)
        return self.ability.layout(batch, self.network.device)

    def _loss(self, rows: Rows) -> Tensor:
        if self.head is None:
            return self._loss_of_forward(rows)
        if self.by_hand:
            rows.extra["packing"].read_S = rows.index_S
        hidden_SD = hidden_states(self.network, rows.tokens_BT, **rows.extra).flatten(0, 1)
        if not self.by_hand:
            hidden_SD = hidden_SD.index_select(0, rows.index_S)
        return head_loss(hidden_SD, rows.targets_S, self.head, consume=True)

    def _loss_of_forward(self, rows: Rows) -> Tensor:
        """The model's own logits, for a head that is not a plain product."""
        out = self.network(input_ids=rows.tokens_BT, use_cache=False, **rows.extra)
        return logits_loss(out.logits.flatten(0, 1).index_select(0, rows.index_S), rows.targets_S)

    def _clip(self, norm: Tensor) -> Tensor:
        limit = self.train.max_grad_norm
        return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)

    def _refuse_long(self, batch: Batch) -> None:
        longest = int(batch.positions_BT.max()) + 1
        limit = self.ability.longest
        if limit is not None and longest > limit:
            raise ModelError(
                f"a sample of {longest} tokens exceeds the attention window of {limit} "
                f"of {type(self.network).__name__}",
                f"set data.max_seq_len = {limit}",
            )

    def _notices(self) -> tuple[str, ...]:
        """Of what was tried before the layers. Makes the head a plain one where that is right."""
        notices = [self.ability.notice] if self.ability.notice else []
        if self.head is None:
            name = type(self.network).__name__
            notices.append(f"the head of {name} is its own; its full logits are computed")
        else:
            self.head, fault = tried(self.head)
            if fault:
                notices.append(f"the loss is PyTorch's, which is slower: {fault}")
        on_cpu = self.network.device.type == "cpu"
        if on_cpu and (fault := cpu_products.fault(self.network.dtype)):
            notices.append(f"products are PyTorch's, which is slower: {fault}")
        return tuple(notices)


def _filled(batch: Batch, train: Train) -> Batch:
    """The last micro-batch of an epoch gets empty rows: compiled code is made for one shape."""
    missing = train.batch_rows - len(batch.tokens_BT)
    if missing <= 0 or batch.tokens_BT.shape[1] != train.row_tokens:
        return batch
    names = ("tokens_BT", "positions_BT", "segments_BT", "scored_BT")
    rows = ((0, missing), (0, 0))
    return replace(batch, **{name: np.pad(getattr(batch, name), rows) for name in names})


def _eager(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Compiled layers run uncompiled inside: another shape would be compiled anew."""
    return torch.compiler.set_stance("force_eager") if wanted else contextlib.nullcontext()


def _to_host(*scalars: Tensor) -> Callable[[], list[float]]:
    """Sends them off in one transfer; what is returned waits for it, and for nothing behind it."""
    sent = torch.stack([scalar.to(scalars[0].dtype) for scalar in scalars])
    if sent.device.type != "cuda":
        return sent.tolist
    here = torch.empty_like(sent, device="cpu", pin_memory=True).copy_(sent, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def arrived() -> list[float]:
        event.synchronize()
        return here.tolist()

    return arrived


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Generator[None]:
    """Random numbers inside are a function of `seed`; those outside are left as they were.

    Dropout masks thus need no state of their own, and checkpointed layers draw them again.
    """
    gpu = device.type != "cpu"
    kind = device.type if gpu else "cuda"
    with torch.random.fork_rng([device.index or 0] if gpu else [], device_type=kind):
        torch.manual_seed(seed)
        yield
