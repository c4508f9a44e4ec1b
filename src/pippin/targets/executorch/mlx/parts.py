"""The decoder's parts in the operators that ExecuTorch's MLX delegate gives to MLX's own kernels.

Shape letters: B batch (1), T tokens, O outputs (or vocabulary), I inputs, D hidden, H heads, K kv
heads, C head channels, S slots of the cache.
"""

from typing import TypeAlias

# The delegate's operators are defined here.
import executorch.backends.mlx.custom_ops  # noqa: F401
import torch
from torch import Tensor, nn

from pippin.model.weights import Checkpoint
from pippin.targets import portable
from pippin.targets.decoder import Shape, Weights
from pippin.targets.executorch.affine import Matrix, require_grid
from pippin.targets.executorch.mlx import BITS
from pippin.targets.folder import Affine, Folder
from pippin.targets.matrices import MatrixParts

_NORM = "model.norm.weight"


# The first slot of a call's tokens, and which of those up to its last they see under a window.
Place: TypeAlias = tuple[int, Tensor | None]


class RMSNorm(portable.RMSNorm):
    """x / rms(x) * weight, as one operator."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(.., D) to (.., D)."""
        return nn.functional.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Unrotated(nn.Module):
    """Heads as they are: Cache rotates them."""

    def __init__(self, head_dim: int):
        super().__init__()

    def forward(self, x_BTHC: Tensor, cos_BT1C: Tensor, sin_BT1C: Tensor) -> Tensor:
        """The first argument."""
        return x_BTHC


class Cache(nn.Module):
    """Keys and values of one layer, (1, K, S, C) each, and rotary attention over them."""

    def __init__(self, shape: Shape, dtype: torch.dtype, periods_C: Tensor, scaling: float):
        super().__init__()
        self.head_dim = shape.head_dim
        # Yarn scales queries and keys alike; one factor on their product does it.
        self.scale = scaling**2 * shape.head_dim**-0.5
        size = (1, shape.num_kv_heads, shape.context, shape.head_dim)
        self.register_buffer("periods", periods_C)
        self.register_buffer("keys", torch.zeros(size, dtype=dtype), persistent=False)
        self.register_buffer("values", torch.zeros(size, dtype=dtype), persistent=False)

    def forward(self, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, place: Place) -> Tensor:
        """Write T tokens at their place, then attend causally; (B, T, H, C) to the same."""
        ops, (start, seen_TS) = torch.ops.mlx, place
        q_BHTC = ops.rope(q_BTHC.transpose(1, 2), self.head_dim, start, freqs=self.periods)
        k_BKTC = ops.rope(k_BTKC.transpose(1, 2), self.head_dim, start, freqs=self.periods)
        ops.kv_cache_update(self.keys, k_BKTC, start)
        ops.kv_cache_update(self.values, v_BTKC.transpose(1, 2), start)
        mask = {"is_causal": True} if seen_TS is None else {"attn_mask": seen_TS}
        mixed_BHTC = ops.custom_sdpa(
            q_BHTC, self.keys, self.values, start, scale=self.scale, **mask
        )
        return mixed_BHTC.transpose(1, 2).contiguous()


class MlxParts(MatrixParts):
    """Parts over symmetric codes; see targets.decoder.Parts."""

    norm, rotation = RMSNorm, Unrotated

    def __init__(self, dtype: torch.dtype, periods_C: Tensor, scaling: float):
        super().__init__()
        self._rotary = (dtype, periods_C, scaling)

    def place(self, shape: Shape, start: int, length: int, window: int | None) -> Place:
        """The first slot: the delegate's attention masks by itself what no window hides."""
        if window is None:
            return start, None
        end = start + length
        back_TS = torch.arange(start, end)[:, None] - torch.arange(end)
        return start, torch.logical_and(back_TS >= 0, back_TS < window)

    def cache(self, shape: Shape) -> nn.Module:  # ty: ignore[incompatible-method-override]
        """Caches in the program's dtype, positions in float32."""
        return Cache(shape, *self._rotary)

    def quantized(self, name: str, found: Affine) -> nn.Module:
        """Raises ModelError for codes that the delegate does not hold."""
        require_grid("executorch-mlx", name, found, BITS)
        return Matrix(found)


def read_weights(folder: Folder, context: int) -> Weights:
    """The folder's weights in these parts; bfloat16 stays, other dtypes become float32."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stored = Checkpoint(folder.path).tensors[_NORM].dtype.name
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    config = AutoConfig.from_pretrained(folder.path, local_files_only=True)
    rotary = LlamaRotaryEmbedding(config)
    parts = MlxParts(dtype, 1 / rotary.inv_freq, rotary.attention_scaling)
    return Weights(parts, folder, context).to(dtype)
