"""What each step will need of memory, disk and time: the arithmetic for a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pippin import memory
from pippin.machine import Machine
from pippin.memory import DTYPE_BYTES
from pippin.memory.jax import jax_bytes
from pippin.memory.layers import TrainShape
from pippin.memory.mlx import mlx_bytes
from pippin.memory.training import PACKED_GROUPS, TrainBytes, train_bytes
from pippin.model.adapter import adapted_linears
from pippin.model.config import ModelConfig, parse_config, read_config
from pippin.model.gguf_file import make_config, open_gguf
from pippin.model.source import locate
from pippin.model.weights import Checkpoint
from pippin.quantizers import CALIBRATED
from pippin.recipe import Recipe
from pippin.steps import Step

BYTES = {"torch": train_bytes, "mlx": mlx_bytes, "jax": jax_bytes}  # of training, by engine
# Resident after the framework and transformers are imported, before any tensor.
FRAMEWORK = 400_000_000
# What libraries hold while training: their code on a CPU, by engine, XLA's compiler among it; two
# workspaces of cuBLAS on CUDA; on MPS it is not the GPU's. benchmarks/bench_forecast.py --fit.
HELD_ON_CPU = {"torch": 525_000_000, "mlx": 315_000_000, "jax": 1_175_000_000}
HELD = {"cuda": 75_000_000, "mps": 0}
# What no arithmetic sees: a plan had better ask for a little too much.
MARGIN = 1.02
# What the evaluation before it leaves resident when one process does the whole run; read off runs
# of the SQL recipe, where training alone peaks that much lower.
LEFT_BEHIND = 450_000_000
# The share of a matrix product's own rate that training and scoring reach.
REACHED = 0.6
# A native bfloat16 product runs at this many times the rate of a float32 one.
NATIVE = 4
# A decoded token waits for memory more than for arithmetic: this many times a scored one.
DECODING = 2
# Tokens that calibration computes at once.
CALIBRATION_TOKENS = 2048
# Export builds the model in float32 a few times over before it is packed.
EXPORT_COPIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Peak memory and disk in bytes; seconds where they can be told."""

    memory: int
    disk: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A model as the arithmetic sees it.

    `linears` are (inputs, outputs) of the adapted ones, `adapted` their last names.
    """

    config: ModelConfig
    linears: tuple[tuple[int, int], ...]
    adapted: frozenset[str]


def look(recipe: Recipe, model: Path) -> Facts | None:
    """The model's shape, from its folder or its GGUF file; None while it is only on the hub."""
    if (model / "config.json").is_file():
        linears = adapted_linears(Checkpoint(model), recipe.lora)
        last = frozenset(name.rpartition(".")[2] for name in linears)
        return Facts(config=read_config(model), linears=tuple(linears.values()), adapted=last)
    place = locate(recipe.model, recipe.folder).location
    if not isinstance(place, Path):
        return None
    config = parse_config(make_config(open_gguf(place)), place)
    adapted = _guess_adapted(config, recipe.lora.targets)
    linears = tuple(memory.linear_shapes(config)[name] for name in adapted) * config.num_layers
    return Facts(config=config, linears=linears, adapted=frozenset(adapted))


def _guess_adapted(config: ModelConfig, targets: Sequence[str]) -> list[str]:
    """Before the tensors' names are there: the Llama family's; a pattern counts as all."""
    names = list(memory.linear_shapes(config))
    return [t for t in targets if t in names] if set(targets) <= set(names) else names


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Asks `memory` about the stages of one recipe; `updates` of training where they are known.

    `evaluates` tells that the base is evaluated in the same process before training.
    """

    recipe: Recipe
    machine: Machine
    facts: Facts
    updates: int | None = None
    evaluates: bool = True

    def need(self, step: Step) -> Need:
        """What one step needs."""
        if step.stage == "evaluate" and "bundle" in step.inputs:
            return self.deployed()
        return getattr(self, step.stage)()

    @property
    def itemsize(self) -> int:
        """Bytes of an element while training."""
        return DTYPE_BYTES[self.train_dtype]

    @property
    def device(self) -> str:
        """What the engine computes on."""
        return self.machine.device(self.recipe.model.device, self.recipe.model.engine)

    @property
    def train_dtype(self) -> str:
        """`auto` is bfloat16 where the device computes it natively; on a CPU PyTorch alone does."""
        if self.recipe.model.dtype != "auto":
            return self.recipe.model.dtype
        native = self.machine.native_bfloat16 and self.recipe.model.engine == "torch"
        return "bfloat16" if self.device != "cpu" or native else "float32"

    @property
    def trained(self) -> int:
        """Trainable parameters."""
        if self.recipe.train.method == "full":
            return memory.parameters(self.facts.config)
        lora = self.recipe.lora
        return memory.adapter_parameters(self.facts.linears, lora.rank, lora.dora)

    @property
    def overhead(self) -> int:
        """What is resident besides tensors, in the memory that counts for the device."""
        return FRAMEWORK if self.device == "cpu" else 0

    def fetch(self) -> Need:
        """A tensor at a time in float32; weights in two bytes on disk."""
        largest = 8 * memory.largest_tensor(self.facts.config)
        return Need(memory=largest, disk=2 * memory.parameters(self.facts.config))

    def train(self) -> Need:
        """The peak of the process, or of the device; checkpoints hold masters and both moments."""
        train = self.recipe.train
        before = LEFT_BEHIND if self.device == "cpu" and self.evaluates else 0
        kept = 12 * self.trained * (train.keep_checkpoints if train.checkpoint_every else 0)
        return Need(
            memory=self.train_peak() + before,
            disk=(4 if train.method == "lora" else 2) * self.trained + kept,
            seconds=self._train_seconds(),
        )

    def train_peak(self) -> int:
        """Tensors, what the framework holds besides them, and what the allocator cannot reuse."""
        tensors = self.train_bytes()
        return int(MARGIN * (tensors.total + tensors.holes + self._held))

    @property
    def _held(self) -> int:
        return HELD.get(self.device, HELD_ON_CPU[self.recipe.model.engine])

    def train_bytes(self) -> TrainBytes:
        """Where the tensors of training go."""
        train, lora, config = self.recipe.train, self.recipe.lora, self.facts.config
        full = train.method == "full"
        shape = TrainShape(
            device=self.device,
            tokens=train.row_tokens * train.batch_rows,
            row=train.row_tokens,
            longest=min(train.row_tokens, self.recipe.data.max_seq_len),
            itemsize=self.itemsize,
            trained=self.trained,
            checkpointing=train.recomputed,
            adapted=frozenset() if full else self.facts.adapted,
            rank=lora.rank,
            gained=sum(o for _, o in self.facts.linears) if lora.dora and not full else 0,
            packed=self._packed(),
            accumulates=train.accumulate > 1,
            math=self.recipe.model.attention == "math",
            compile=train.compile,
            dropout=lora.dropout > 0 and not full,
            kernels=self.device != "cpu" or self.machine.compiles,
        )
        return BYTES[self.recipe.model.engine](config, shape)

    @property
    def trains_over_codes(self) -> bool:
        """Whether a quantized base stays in its codes while it trains."""
        engine = self.recipe.model.engine
        if engine == "mlx":
            return self.device != "cpu"
        return engine == "jax" or (self.device != "mps" and self.itemsize == 2)

    def _packed(self) -> float:
        """Bytes of a linear's weight in codes, scale and bias included; 0 for those in b bytes."""
        asked, engine = self.facts.config.quantization or {}, self.recipe.model.engine
        if engine == "mlx" and self.device == "cpu" and not asked:  # it keeps a file's two bytes
            frozen = self.recipe.train.method == "lora"
            return 2.0 if frozen and self.facts.config.dtype == "bfloat16" else 0.0
        bits, group, torch = asked.get("bits", 0), asked.get("group_size", 0), engine == "torch"
        fits = bits == 4 and group in PACKED_GROUPS if torch else group > 0
        if not (fits and self.trains_over_codes):
            return 0.0
        twice = torch and self.device == "cpu"  # its kernel has scales and biases of its own
        return bits / 8 + (8 if twice else 4) / group

    def _train_seconds(self) -> float | None:
        if self.updates is None or self._rate is None:
            return None
        train = self.recipe.train
        tokens = train.row_tokens * train.batch_rows * train.accumulate * self.updates
        faster = NATIVE if self.itemsize == 2 and self.machine.native_bfloat16 else 1
        operations = memory.operations(train.method, train.recomputed)
        return operations * memory.parameters(self.facts.config) * tokens / self._rate / faster

    @property
    def _rate(self) -> float | None:
        return self.machine.gflops * 1e9 * REACHED if self.device == "cpu" else None

    def merge(self) -> Need:
        """One tensor and its delta; a whole model on disk."""
        config = self.facts.config
        return Need(
            memory=memory.merge_bytes(config, 2) + self.overhead // 2,
            disk=2 * memory.parameters(config),
        )

    def quantize(self) -> Need:
        """One tensor, and what calibration holds; codes on disk."""
        needed = memory.quantize_bytes(self.facts.config, 2) + self.overhead // 2
        if self.recipe.quantize.method in CALIBRATED:
            needed += self._calibrate() + FRAMEWORK // 2
        return Need(memory=needed, disk=self._quantized())

    def _calibrate(self) -> int:
        """The model with its moments, or a layer with its own where moments take several passes."""
        asked, config = self.recipe.quantize, self.facts.config
        tuned = asked.recover_tokens > 0
        by_loss = tuned or (CALIBRATED[asked.method].by_loss and asked.importance == "loss")
        tokens = CALIBRATION_TOKENS // 2 if by_loss else CALIBRATION_TOKENS
        back = memory.loss_bytes(config, tokens, self.itemsize) if by_loss else 0
        large = asked.sequential or (memory.moment_bytes(config) > memory.MOMENTS and not tuned)
        if large and self.recipe.model.engine != "jax" and config.model_type in memory.LAYERED:
            both = (tokens, asked.calibration_tokens)
            return memory.layered_bytes(config, self.itemsize, both) + back
        if by_loss:
            back += memory.activations(config, tokens, self.itemsize)
        if tuned:
            back += 2 * memory.parameters(config)  # codes, and the parent's head beside the child's
        return memory.calibrate_bytes(config, self.itemsize, CALIBRATION_TOKENS) + back

    def qat(self) -> Need:
        """As `codes_bytes` says; checkpoints hold what scales moved by and both moments."""
        q, train, config = self.recipe.quantize, self.recipe.train, self.facts.config
        linears = memory.linear_parameters(config)
        trained = (1 if q.scheme == "symmetric" else 2) * linears // (q.group_size or 512)
        batch = train.row_tokens * train.batch_rows
        held = memory.codes_bytes(config, batch, self.itemsize, (trained, train.recomputed == 1))
        dense = (self.recipe.model.engine, self.device) == ("mlx", "cpu")  # while it loads
        disk = self._quantized() + 12 * trained * max(1, train.keep_checkpoints)
        return Need(memory=held + self._held + 4 * linears * dense, disk=disk)

    def evaluate(self) -> Need:
        """The dense model in the evaluation's dtype, a batch of rows, the answers' cache."""
        asked = self.recipe.evaluate
        itemsize = DTYPE_BYTES.get(asked.dtype, self.itemsize)
        tokens = self.recipe.data.max_seq_len
        needed = memory.evaluate_bytes(self.facts.config, asked.batch_rows, tokens, itemsize)
        return Need(
            memory=needed + self.overhead,
            disk=8 * asked.topk * asked.rows * tokens,
            seconds=self._evaluate_seconds(tokens),
        )

    def _evaluate_seconds(self, tokens: int) -> float | None:
        """2N operations a token, at most: rows as long as they may be."""
        if self._rate is None:
            return None
        asked = self.recipe.evaluate
        scored = asked.rows * tokens
        decoded = asked.generate_rows * asked.max_tokens * DECODING
        return 2 * memory.parameters(self.facts.config) * (scored + decoded) / self._rate

    def deploy(self) -> Need:
        """Export in float32; a file of about the quantized size, with some tables beside it."""
        dense = 4 * memory.parameters(self.facts.config) * EXPORT_COPIES
        return Need(memory=dense + FRAMEWORK, disk=self._quantized() * 5 // 4)

    def deployed(self) -> Need:
        """The file and its runtime."""
        config = self.facts.config
        cache = memory.cache_bytes(config, 1, self.recipe.deploy.context, 4)
        return Need(memory=2 * self._quantized() + cache + FRAMEWORK, disk=0)

    def _quantized(self) -> int:
        q = self.recipe.quantize
        grids = ((q.bits, q.group_size), (q.embed_bits, q.embed_group_size))
        return memory.quantized_size(self.facts.config, grids)
