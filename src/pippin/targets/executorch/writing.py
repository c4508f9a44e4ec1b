"""Quantized folder to bundle: export, lower, write, describe, and prove what was written."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.errors import ModelError
from pippin.events import Event, Metric, Notice, Progress
from pippin.model.names import CONFIG, SIDE_FILES
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.targets import Bundle
from pippin.targets.executorch import check, lowering
from pippin.targets.executorch.constraint import refuse_model
from pippin.targets.executorch.decoder import Decoder, Weights
from pippin.targets.executorch.delegation import Delegation, read_delegation
from pippin.targets.executorch.folder import Folder
from pippin.targets.executorch.guide import guide
from pippin.targets.executorch.runtime import PteModel
from pippin.targets.executorch.stored import require_stored
from pippin.versions import versions

DESCRIPTION, PROGRAM, GUIDE = "deploy.json", "model.pte", "README.md"
_TEXT = (
    "Water boils at a lower temperature on a high mountain, because the air above presses on it "
    "with less force. A cook who climbs must be patient: rice takes longer, beans longer still, "
    "and tea never tastes quite right. In 1804 a young chemist carried his instruments to 7,016 "
    "metres under a balloon, wrote down what he felt, and found the air up there made of the same "
    "gases as below: about 21 parts of oxygen in 100.\n\ndef pressure(height: float) -> float:\n"
    "    return 101325 * (1 - 2.25577e-5 * height) ** 5.25588\n"
)


def write(bundle: Bundle) -> Iterator[Event]:
    """Fill `bundle.folder`, which exists; events carry stage `deploy`.

    Raises ModelError for a model or codes that XNNPACK cannot hold, or another model's tokenizer,
    and PippinError where the written file computes something else than the quantized model.
    """
    for refusal in refuse_model(bundle.quantized):
        raise ModelError(*refusal)
    context = _require_context(bundle)
    tokenizer = load_tokenizer(bundle.quantized)
    started = time.perf_counter()
    weights = Weights(Folder(bundle.quantized), context)
    program = lowering.export(Decoder(weights, every=False), context)
    yield _progress(1, started)
    edge = lowering.lower(program, runner_constants(tokenizer, weights))
    del program
    delegation = read_delegation(edge.exported_program().graph_module)
    yield _progress(2, started)
    with (bundle.folder / PROGRAM).open("wb") as file:
        lowering.serialize(edge).write_to_file(file)
    del edge
    _copy_side_files(bundle)
    yield _progress(3, started)
    stored = require_stored(bundle.folder / PROGRAM, weights)
    prompts, notices = _prompts(tokenizer, context)
    yield from notices
    model = PteModel(bundle.folder / PROGRAM, context)
    figures = check.check(model, weights, prompts)
    yield Metric(stage="deploy", step=0, values={k: float(v) for k, v in asdict(figures).items()})
    description = _describe(bundle, tokenizer, delegation, figures) | {"stored": stored}
    _write_json(bundle.folder / DESCRIPTION, description)
    (bundle.folder / GUIDE).write_text(guide(description))
    yield _progress(4, started)


def load(folder: Path) -> PteModel:
    """The bundle's .pte. Raises ModelError where a file is missing or not as it was written."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: {error}", "deploy again: --redo deploy") from error
    for name, digest in description["digests"].items():
        if not (folder / name).is_file() or artifact.digest(folder / name) != digest:
            raise ModelError(
                f"{folder / name} is not the file that was deployed with {PROGRAM}",
                "a tokenizer of another model gives other tokens; deploy again: --redo deploy",
            )
    return PteModel(folder / PROGRAM, description["context"])


def runner_constants(tokenizer: Tokenizer, weights: Weights) -> dict[str, Any]:
    """The constant methods that ExecuTorch's LLM runners read from a .pte."""
    return {
        "get_max_seq_len": weights.shape.context,
        "get_max_context_len": weights.shape.context,
        "get_vocab_size": weights.shape.vocab_size,
        "get_bos_id": tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id,
        "get_eos_ids": sorted(tokenizer.stop_ids),
        "get_n_layers": weights.shape.num_layers,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "use_sdpa_with_kv_cache": True,
    }


def _require_context(bundle: Bundle) -> int:
    limit = Folder(bundle.quantized).config.max_positions
    if bundle.context < 8 or (limit is not None and bundle.context > limit):
        raise ModelError(
            f"a context of {bundle.context} tokens; the model knows positions up to {limit}",
            f"set deploy.context between 8 and {limit}",
        )
    return bundle.context


def _copy_side_files(bundle: Bundle) -> None:
    for name in (*SIDE_FILES, CONFIG):
        if (bundle.quantized / name).is_file():
            shutil.copyfile(bundle.quantized / name, bundle.folder / name)


def _prompts(tokenizer: Tokenizer, context: int) -> tuple[list[list[int]], list[Event]]:
    text = tokenizer.encode(_TEXT)
    prompts = [text[:1], text[:5], text[: min(len(text), context - 1)]]
    if not tokenizer.has_template:
        return prompts, [
            _notice("the model has no chat template; the check is of plain text alone")
        ]
    messages = [{"role": "user", "content": "What is gravity? Answer in two sentences."}]
    chat = tokenizer.render(messages, generation_prompt=True)
    if len(chat) >= context:
        return prompts, [_notice(f"a chat prompt of {len(chat)} tokens does not fit: not checked")]
    return [*prompts, chat], []


def _describe(
    bundle: Bundle,
    tokenizer: Tokenizer,
    delegation: Delegation,
    figures: check.Figures,
) -> dict[str, Any]:
    generation = bundle.quantized / "generation_config.json"
    return {
        "target": "executorch",
        "backend": "xnnpack",
        "context": bundle.context,
        "stop_ids": sorted(tokenizer.stop_ids),
        "bos_id": tokenizer.bos_id,
        "generation": json.loads(generation.read_text()) if generation.is_file() else {},
        "size_bytes": (bundle.folder / PROGRAM).stat().st_size,
        "parent": artifact.digest(bundle.quantized),
        "digests": artifact.file_digests(bundle.folder),
        "versions": versions(),
        "delegation": asdict(delegation),
        "check": asdict(figures),
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _progress(done: int, started: float) -> Progress:
    return Progress(
        stage="deploy", done=done, values={"seconds": round(time.perf_counter() - started, 1)}
    )


def _notice(text: str) -> Notice:
    return Notice(stage="deploy", text=f"executorch: {text}")
