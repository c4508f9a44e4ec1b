"""What the numbers of a recipe must satisfy: one range a key, and the few rules between keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pippin.figures import bytes_of
from pippin.quantizers import CALIBRATED
from pippin.quantizers.nested import GROUP, MOST, SYMMETRIC
from pippin.recipe import BUDGETS, Gates, Quantize, Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """An interval; a bound that is None is open to infinity."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value lies inside; NaN never does."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and value == value
        )

    def __str__(self) -> str:
        """The interval in words, e.g. `at least 0 and below 1`."""
        bounds = (
            ("at least", self.at_least),
            ("above", self.above),
            ("at most", self.at_most),
            ("below", self.below),
        )
        return " and ".join(f"{word} {bound:,}" for word, bound in bounds if bound is not None)


# The key, what is wrong, the way out.
Contradiction: TypeAlias = tuple[tuple[str, ...], str, str]

COUNT = Range(at_least=1)
NATURAL = Range(at_least=0)
POSITIVE = Range(above=0)
SHARE = Range(at_least=0, at_most=1)
BETA = Range(at_least=0, below=1)

LIMITS = {
    "data.max_rows": COUNT,
    "data.max_seq_len": Range(at_least=2),
    "deploy.context": Range(at_least=2),
    "deploy.gate_prompts": Range(at_least=1, at_most=32),
    "evaluate.batch_rows": COUNT,
    "evaluate.generate_rows": NATURAL,
    "evaluate.max_tokens": COUNT,
    "evaluate.prompt_tokens": COUNT,
    "evaluate.rows": COUNT,
    "evaluate.slow_seconds": COUNT,
    "evaluate.topk": COUNT,
    "gates.*.max_kl": NATURAL,
    "gates.*.min_exact_match": SHARE,
    "gates.*.min_gain_kept": Range(),
    "gates.*.min_top1": SHARE,
    "lora.alpha": POSITIVE,
    "lora.dropout": BETA,
    "lora.rank": COUNT,
    "qat.learning_rate": POSITIVE,
    "qat.steps": NATURAL,
    "quantize.calibration_tokens": COUNT,
    "quantize.max_kl": POSITIVE,
    "quantize.recover_passes": COUNT,
    "quantize.recover_tokens": NATURAL,
    "quantize.target_bits": Range(at_least=2, at_most=16),
    "seed": Range(at_least=0, below=2**32),
    "train.accumulate": COUNT,
    "train.batch_rows": COUNT,
    "train.beta1": BETA,
    "train.beta2": BETA,
    "train.checkpoint_every": NATURAL,
    "train.epochs": POSITIVE,
    "train.eps": POSITIVE,
    "train.keep_checkpoints": COUNT,
    "train.learning_rate": POSITIVE,
    "train.max_grad_norm": NATURAL,
    "train.min_learning_rate": NATURAL,
    "train.patience": NATURAL,
    "train.recomputed_layers": Range(above=0, at_most=1),
    "train.row_tokens": Range(at_least=2),
    "train.spike": NATURAL,
    "train.steps": COUNT,
    "train.valid_every": NATURAL,
    "train.valid_rows": COUNT,
    "train.warmup_steps": NATURAL,
    "train.weight_decay": NATURAL,
}


def limit(path: tuple[str, ...]) -> Range | None:
    """The range of a number's key; None where every number of its type will do."""
    if path[0] == "gates":
        path = ("gates", "*", *path[2:])
    return LIMITS.get(".".join(path))


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Keys that cannot both be meant, and those that name nothing."""
    for table, source in (("model", recipe.model.source), ("data", recipe.data.source)):
        if not source.strip():
            yield (table, "source"), "is empty", "name a file or folder, or what the hub has"
    yield from _engine(recipe)
    yield from _training(recipe)
    yield from _merging(recipe)
    yield from _quantizing(recipe.quantize)
    yield from _on_codes(recipe)
    yield from _budgets(recipe.quantize)


def _engine(recipe: Recipe) -> Iterator[Contradiction]:
    """What some engines lack, and would refuse only when its turn comes."""
    engine, budget = recipe.model.engine, recipe.quantize.budget
    hint = 'leave it out, or set model.engine = "torch"'
    lacks_jax = {
        ("quantize", budget or ""): (bool(budget), "has no gradients of inputs"),
        ("quantize", "recover_tokens"): (recipe.quantize.recover_tokens > 0, "tunes no scales"),
        ("quantize", "sequential"): (recipe.quantize.sequential, "takes no model apart by layers"),
        ("qat", "steps"): (recipe.qat.steps > 0, "trains no scales of codes"),
    }
    torch_alone = {
        ("model", "attention"): (recipe.model.attention == "math", "has one way to compute it"),
        ("train", "recomputed_layers"): (
            recipe.train.recomputed_layers < 1,
            "recomputes all layers or none",
        ),
    }
    for key, (is_asked, does) in lacks_jax.items():
        if is_asked and engine == "jax":
            yield key, f"the engine jax {does}", f'{hint} or "mlx"'
    for key, (is_asked, does) in torch_alone.items():
        if is_asked and engine != "torch":
            yield key, f"the engine {engine} {does}", hint


def _training(recipe: Recipe) -> Iterator[Contradiction]:
    train, lora = recipe.train, recipe.lora
    if train.min_learning_rate > train.learning_rate:
        yield (
            ("train", "min_learning_rate"),
            f"{train.min_learning_rate:g} is above learning_rate {train.learning_rate:g}",
            "the decay ends below its peak",
        )
    if train.method == "lora" and not lora.targets:
        yield (
            ("lora", "targets"),
            "no linear is adapted",
            'name some, e.g. ["q_proj", "v_proj"], or use ["all-linear"]',
        )
    if train.method == "full" and recipe.model.adapter is not None:
        yield (
            ("model", "adapter"),
            "full fine-tuning makes a model, not an adapter",
            "leave one of model.adapter and train.method out",
        )
    if train.method == "full" and train.frozen_dtype != "auto":
        yield (
            ("train", "frozen_dtype"),
            "full fine-tuning freezes nothing",
            "leave it out, or set train.method = lora",
        )
    if train.recomputed_layers < 1 and not train.gradient_checkpointing:
        yield (
            ("train", "recomputed_layers"),
            "is a share of what gradient_checkpointing recomputes, which is off",
            "set train.gradient_checkpointing = true",
        )
    if train.patience and not train.valid_every:
        yield (
            ("train", "patience"),
            "counts validations, and valid_every is 0",
            "set train.valid_every",
        )


def _merging(recipe: Recipe) -> Iterator[Contradiction]:
    full, one_pass = recipe.train.method == "full", recipe.quantize.one_pass
    if recipe.model.adapter_base is not None and recipe.model.adapter is None:
        yield (
            ("model", "adapter_base"),
            "is the base of model.adapter, which is not given",
            "give the adapter, or leave adapter_base out",
        )
    if full and one_pass:
        yield (
            ("quantize", "one_pass"),
            "full fine-tuning has no adapter to merge",
            "leave it out, or set train.method = lora",
        )
    if (full or one_pass) and recipe.gates.merged != Gates().merged:
        yield (
            ("gates", "merged"),
            "no merged model is made on this way, so none is judged",
            "leave it out; gates.quantized judges what comes of the adapter",
        )


def _quantizing(asked: Quantize) -> Iterator[Contradiction]:
    for name in ("recover_tokens", "calibration"):
        if getattr(asked, name) and asked.method not in CALIBRATED:
            yield (
                ("quantize", name),
                f"{asked.method} reads no rows",
                f"use {', '.join(CALIBRATED)}",
            )
    if asked.recover_passes > 1 and not asked.recover_tokens:
        yield (
            ("quantize", "recover_passes"),
            "there are no rows to go through",
            "give quantize.recover_tokens, or leave it out",
        )
    if asked.sequential and (asked.method != "gptq" or asked.recover_tokens):
        yield (
            ("quantize", "sequential"),
            "gptq alone goes on layer by layer, without recovery",
            'set quantize.method = "gptq" and recover_tokens = 0, or sequential = false',
        )
    yield from _nesting(asked)
    grids = ((asked.scheme, asked.bits), (asked.embed_scheme, asked.embed_bits))
    fixed = any(s == "symmetric" or (s == "k" and bits in SYMMETRIC) for s, bits in grids)
    if asked.method == "hqq" and fixed:
        yield (
            ("quantize", "method"),
            "hqq moves zero points; symmetric codes and K types of 3 and 6 bits have none",
            'set quantize.scheme and quantize.embed_scheme = "affine", or use mse',
        )


def _nesting(asked: Quantize) -> Iterator[Contradiction]:
    parts = (
        ("", asked.scheme, asked.bits, asked.group_size),
        ("embed_", asked.embed_scheme, asked.embed_bits, asked.embed_group_size),
    )
    for prefix, scheme, bits, group_size in parts:
        if scheme != "k" or bits == 16:
            continue
        if bits not in MOST:
            yield (
                ("quantize", f"{prefix}bits"),
                f"no K type has {bits} bits",
                f"set it to one of {', '.join(map(str, MOST))}, or {prefix}scheme to symmetric",
            )
        if group_size != GROUP:
            yield (
                ("quantize", f"{prefix}group_size"),
                f"the K types have groups of {GROUP}",
                f"set quantize.{prefix}group_size = {GROUP}",
            )
        if asked.recover_tokens or asked.budget:
            yield (
                ("quantize", f"{prefix}scheme"),
                "scales of scales are neither tuned nor given bits under a budget",
                "leave out recover_tokens and the budget, or take another scheme",
            )


def _on_codes(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.qat.steps and recipe.quantize.scheme == "k":
        yield (
            ("qat", "steps"),
            "scales of scales cannot be trained apart",
            'set qat.steps = 0, or quantize.scheme = "affine"',
        )


def _budgets(asked: Quantize) -> Iterator[Contradiction]:
    if asked.budget is None:
        return
    key = ("quantize", asked.budget)
    if (asked.method, asked.importance) != ("best", "loss"):
        yield (
            key,
            "bits are shared out by what they cost in the loss",
            'set quantize.method = "best" and quantize.importance = "loss"',
        )
    given = [name for name in BUDGETS if getattr(asked, name) is not None]
    if len(given) > 1:
        yield key, f"bits are shared out under one limit, {' and '.join(given)} are two", "keep one"
    if asked.max_size is not None and bytes_of(asked.max_size) is None:
        yield (
            ("quantize", "max_size"),
            f"{asked.max_size!r} is no size",
            'write it like "900MB" or "1.9 GB", in powers of 1000',
        )
