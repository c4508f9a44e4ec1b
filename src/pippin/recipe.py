"""Everything a recipe may say: one frozen dataclass a table, the only source of keys and defaults.

The reader of recipe files, the CLI and the reference page are all derived from these classes.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
EngineName: TypeAlias = Literal["jax", "mlx", "torch"]
DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
AttentionName: TypeAlias = Literal["auto", "math"]
DataFormat: TypeAlias = Literal[
    "auto", "messages", "prompt_completion", "instruction", "sharegpt", "text"
]
TooLong: TypeAlias = Literal["error", "cut", "drop"]
TrainOn: TypeAlias = Literal["assistant", "last", "all"]
Method: TypeAlias = Literal["lora", "full"]
FrozenDType: TypeAlias = Literal["auto", "float8"]
Schedule: TypeAlias = Literal["cosine", "linear", "constant"]
QuantizerName: TypeAlias = Literal["awq", "best", "gptq", "hqq", "mse", "rtn"]
Scheme: TypeAlias = Literal["symmetric", "affine", "k"]
Importance: TypeAlias = Literal["loss", "inputs"]
TargetName: TypeAlias = Literal[
    "coreai",
    "coreml",
    "executorch",
    "executorch-coreml",
    "executorch-mlx",
    "executorch-vulkan",
    "gguf",
    "hf",
    "mlx",
]
# Those whose files nothing on a desk runs: they are checked as they are made, and not evaluated.
DEVICE_ONLY = ("executorch-vulkan",)

# What bits are shared out under: at most one of these keys of [quantize].
BUDGETS = ("target_bits", "max_size", "max_kl")


def key(default: Any, doc: str) -> Any:
    """A recipe key: its default and the sentence the reference page prints."""
    return field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    """A recipe key without a default."""
    return field(metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Where the model comes from and how it is computed."""

    source: str = required("hub id, local folder, `.gguf` file or `builtin:smollm2`")
    revision: str | None = key(None, "branch, tag or commit of a hub id")
    adapter: str | None = key(
        None, "a PEFT folder that is there already: merged and measured, nothing is trained"
    )
    adapter_base: str | None = key(
        None,
        "the folder that `adapter` was trained on, where it is `source` in fewer bits: the adapter "
        "then goes into the weights of `source`, which are compared with it first",
    )
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    engine: EngineName = key("torch", "framework that trains and evaluates")
    device: DeviceName = key("auto", "auto picks cuda, then mps, then cpu, and says so")
    dtype: DType = key("auto", "dtype of the frozen weights and activations while training")
    attention: AttentionName = key(
        "auto",
        "auto takes fused kernels; math plain products, slower and larger, for a device whose "
        "kernels `pippin check` found wrong (PyTorch alone)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What the model learns from."""

    source: str = required("file, folder with train/valid/test files, or hub data set id")
    valid: str | None = key(None, "validation file, where `source` is one file")
    test: str | None = key(None, "held-out file, where `source` is one file")
    format: DataFormat = key("auto", "how rows are read; auto looks at their keys")
    chat_template: bool = key(True, "wrap prompt/completion rows in the model's chat template")
    max_rows: int | None = key(None, "use only the first rows of the training split")
    max_seq_len: int = key(1024, "longest sample in tokens")
    too_long: TooLong = key("error", "what happens to a longer sample; the report counts them")
    train_on: TrainOn = key("assistant", "turns that are scored: every assistant turn, last, all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """The adapter."""

    rank: int = key(16, "rank of every pair of matrices")
    alpha: float = key(32.0, "the update is scaled by alpha / rank")
    dropout: float = key(0.0, "probability of dropping an input of the adapter")
    targets: tuple[str, ...] = key(
        ("all-linear",), "linears by last name, by `*` pattern over the full name, or all-linear"
    )
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")
    dora: bool = key(False, "DoRA: train the norm of an output's weights apart from direction")
    mlx_lm: bool = key(False, "write it in mlx-lm's layout too, in the adapter's folder `mlx-lm`")

    @property
    def scale(self) -> float:
        """The factor of B @ A, as peft computes it."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """The training loop."""

    method: Method = key("lora", "lora, or full fine-tuning")
    epochs: float = key(1.0, "passes over the training rows, where `steps` is not given")
    steps: int | None = key(None, "optimizer updates")
    row_tokens: int = key(1024, "length of a packed row; samples never attend to each other")
    batch_rows: int = key(1, "packed rows in one forward pass")
    accumulate: int = key(1, "forward passes in one update, weighted by scored tokens")
    packing: bool = key(True, "several samples in a row; false puts one sample in a row")
    learning_rate: float = key(2e-4, "peak learning rate")
    schedule: Schedule = key("cosine", "shape of the decay after warm-up")
    warmup_steps: int = key(0, "updates with a linearly rising learning rate")
    min_learning_rate: float = key(0.0, "where the decay ends")
    weight_decay: float = key(0.0, "AdamW's decoupled decay")
    beta1: float = key(0.9, "AdamW's first moment")
    beta2: float = key(0.999, "AdamW's second moment")
    eps: float = key(1e-8, "AdamW's epsilon")
    max_grad_norm: float = key(1.0, "gradients are scaled down to this norm; 0 turns clipping off")
    gradient_checkpointing: bool = key(
        False, "recompute activations: less memory, about 1.3x the time"
    )
    recomputed_layers: float = key(
        1.0, "share of the layers that gradient_checkpointing recomputes; the rest keep theirs"
    )
    frozen_dtype: FrozenDType = key(
        "auto",
        "auto is model.dtype; float8 rounds frozen linears: faster on new CUDA cards, coarser",
    )
    compile: bool = key(
        True, "compile layers where that is faster and gives the same numbers (PyTorch on CUDA)"
    )
    valid_every: int = key(0, "updates between validation losses; 0 validates once, at the end")
    valid_rows: int = key(64, "validation rows that are scored")
    patience: int = key(0, "stop after this many validations without a better loss; 0 never")
    checkpoint_every: int = key(50, "updates between checkpoints; 0 writes one on Ctrl-C alone")
    keep_checkpoints: int = key(2, "checkpoints left on disk")
    spike: float = key(
        5.0, "stop when a loss exceeds the recent median by this factor and a nat; 0 never"
    )

    @property
    def recomputed(self) -> float:
        """The share of the layers whose activations are computed again."""
        return self.recomputed_layers if self.gradient_checkpointing else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantize:
    """How weights become small."""

    method: QuantizerName = key(
        "best",
        "how codes are chosen: nearest on a plain grid (rtn), on a searched one (mse) or with "
        "moved zero points (hqq), or so that the outputs on training rows are kept: by inputs "
        "scaled beforehand (awq), or errors made up for (gptq, best)",
    )
    bits: Literal[2, 3, 4, 5, 6, 8] = key(4, "bits of a linear's codes")
    group_size: Literal[0, 32, 64, 128] = key(64, "weights that share a scale; 0 is per channel")
    scheme: Scheme = key("symmetric", "symmetric around 0, affine between extremes, k as in GGUF")
    embed_bits: Literal[2, 3, 4, 5, 6, 8, 16] = key(8, "bits of embedding and head; 16 leaves them")
    embed_group_size: Literal[0, 32, 64, 128] = key(0, "group size of embedding and head")
    embed_scheme: Scheme = key("symmetric", "scheme of embedding and head")
    keep: tuple[str, ...] = key((), "`*` patterns of tensors left in their own dtype")
    calibration: str | None = key(
        None, "a file of rows or text that awq, gptq and best read in place of the training rows"
    )
    calibration_tokens: int = key(8192, "tokens of training rows that awq, gptq and best read")
    recover_tokens: int = key(
        0,
        "tokens of training rows, those that did not calibrate first, on which calibrated methods' "
        "scales and zero points, and norms, are tuned by gradients until the predictions are the "
        "model's before; 0 leaves them",
    )
    recover_passes: int = key(1, "how often recovery goes through its rows")
    sequential: bool = key(False, "gptq reads what the layers quantized before give, one by one")
    importance: Importance = key(
        "loss",
        "what counts for best: a token's part in the predictions, found by a backward pass, or all "
        "inputs alike, which takes half the time",
    )
    target_bits: float | None = key(
        None,
        "bits of a linear's weight on average, as the targets store it with its scales: best gives "
        "each tensor 2 to 8, or leaves it, by what it costs in divergence; `bits` no longer counts",
    )
    max_size: str | None = key(
        None, 'bits shared out so that all weights, embedding too, take this much, e.g. "1.9GB"'
    )
    max_kl: float | None = key(
        None, "the fewest bits expected to leave this divergence from the model before, in nats"
    )
    one_pass: bool = key(
        False,
        "merge the adapter while its model is quantized: no merged model is written or measured, "
        "and a base that exists in few bits only needs no dense copy on disk",
    )

    @property
    def budget(self) -> str | None:
        """The key under which bits are shared out, where one is given."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)

    @property
    def goal(self) -> str:
        """What linears are brought to, in words: `4 bits`, `1.9GB`, `a KL of 0.02`."""
        kl = f"a KL of {self.max_kl:g}" if self.max_kl is not None else None
        return self.max_size or kl or f"{self.target_bits or self.bits:g} bits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qat:
    """Training goes on with the quantized model; rows and checkpoints as [train] says."""

    steps: int = key(0, "updates of scales and zero points on the training rows; 0 is without")
    learning_rate: float = key(1e-3, "peak learning rate, in shares of a scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """What every stage is measured on."""

    rows: int = key(100, "held-out rows that are scored")
    generate_rows: int = key(100, "held-out rows answered and compared with their reference")
    max_tokens: int = key(64, "longest answer")
    batch_rows: int = key(16, "rows scored or answered at once")
    topk: int = key(64, "tokens of the parent's distribution kept for the divergence")
    dtype: DType = key("float32", "dtype of the computation that compares the stages")
    prompts: tuple[str, ...] = key((), "answered by every stage, decoded greedily")
    prompt_tokens: int = key(48, "longest answer to a prompt")
    slow_seconds: int = key(
        60, "what rows and answers of a coreai, coreml or executorch-coreml file may take"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Limits one stage must keep; a missed one stops the run."""

    max_kl: float | None = key(None, "KL divergence to the parent, nats a token")
    min_top1: float | None = key(None, "share of positions whose likeliest token is the parent's")
    min_gain_kept: float | None = key(None, "share of the adapter's held-out gain that is left")
    min_exact_match: float | None = key(None, "share of held-out answers equal to their reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """A gate for each stage that is measured."""

    adapter: Gate = key(Gate(), "the tuned model")
    merged: Gate = key(Gate(max_kl=0.01, min_top1=0.97), "against the adapter")
    quantized: Gate = key(Gate(min_gain_kept=0.95), "against the merged model")
    deployed: Gate = key(Gate(), "against the quantized model")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deploy:
    """What leaves the machine."""

    targets: tuple[TargetName, ...] = key(("executorch",), "deployment formats; () stops before")
    context: int = key(512, "tokens the deployed model can hold")
    gate_prompts: int = key(32, "prompts, of 32, that each file is compared on")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole recipe. `folder` is where relative paths start: the folder of the recipe file."""

    model: Model
    data: Data
    lora: Lora = Lora()
    train: Train = Train()
    quantize: Quantize = Quantize()
    qat: Qat = Qat()
    evaluate: Evaluate = Evaluate()
    gates: Gates = Gates()
    deploy: Deploy = Deploy()
    seed: int = key(0, "every random choice follows from it")
    out: str = key("", "folder of the run, from the current folder; empty is runs/<name>")
    name: str = key("", "name of the run; empty is the recipe file's name")
    folder: Path = Path()


TABLES = {f.name: f.type for f in fields(Recipe) if f.name not in ("seed", "out", "name", "folder")}
