"""What every deployed bundle has beside its model: tokenizer, description, README, digests."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.errors import ModelError
from pippin.events import Notice, Progress
from pippin.model import source
from pippin.model.names import CONFIG, GENERATION_CONFIG, SIDE_FILES
from pippin.model.tokenizer import Tokenizer
from pippin.targets import Bundle, refuse_context
from pippin.targets.guide import Guide, render
from pippin.versions import versions

DESCRIPTION, README = "deploy.json", "README.md"
_TEXT = (
    "Water boils at a lower temperature on a high mountain, because the air above presses on it "
    "with less force. A cook who climbs must be patient: rice takes longer, beans longer still, "
    "and tea never tastes quite right. In 1804 a young chemist carried his instruments to 7,016 "
    "metres under a balloon, wrote down what he felt, and found the air up there made of the same "
    "gases as below: about 21 parts of oxygen in 100.\n\ndef pressure(height: float) -> float:\n"
    "    return 101325 * (1 - 2.25577e-5 * height) ** 5.25588\n"
)


def require_context(bundle: Bundle) -> int:
    """The bundle's context in tokens. Raises ModelError where the model has fewer positions."""
    refusal = refuse_context(bundle.context, bundle.quantized)
    if refusal is not None:
        raise ModelError(*refusal)
    return bundle.context


def copy_side_files(bundle: Bundle) -> None:
    """Tokenizer, template, generation defaults and config.json into the bundle."""
    source.copy_side_files(bundle.quantized, bundle.folder)
    shutil.copyfile(bundle.quantized / CONFIG, bundle.folder / CONFIG)


def corpus(tokenizer: Tokenizer) -> list[str]:
    """Texts on which tokenizers part: special tokens, numbers, spaces, other scripts, a chat."""
    plain = [
        _TEXT,
        "in 2026, 1234567 x 3.14159 = ?",
        "  two  spaces,\ttabs\n\n\nand   lines \n",
        "naïve café, Größe, Ελληνικά, русский, العربية, हिन्दी, 日本語のテキスト, 한국어, 🙂👩‍👩‍👧",
        "I'll, you're, THEY'VE; snake_case camelCase <tag/> {json: [1, 2]}",
    ]
    specials = [f"before{text}after {text}" for text in tokenizer.special_texts[:8]]
    if not tokenizer.has_template:
        return plain + specials
    turns = [
        {"role": "user", "content": "What is gravity?"},
        {"role": "assistant", "content": "A force."},
        {"role": "user", "content": "Только два слова."},
    ]
    return [*plain, *specials, tokenizer.render_text(turns, generation_prompt=True)]


def describe(bundle: Bundle, target: str, tokenizer: Tokenizer, files: dict[str, str]) -> Any:
    """What deploy.json says of every bundle; the files' digests are taken as they now are.

    `files` says what each of the target's own files is; those together are its size.
    """
    return {
        "target": target,
        "files": files,
        "context": bundle.context,
        "stop_ids": sorted(tokenizer.stop_ids),
        "bos_id": tokenizer.bos_id,
        "generation": generation_defaults(bundle),
        "size_bytes": sum(_bytes(bundle.folder / name) for name in files),
        "parent": artifact.digest(bundle.quantized),
        "digests": artifact.file_digests(bundle.folder),
        "versions": versions(),
    }


def generation_defaults(bundle: Bundle) -> dict[str, Any]:
    """The model's own defaults for sampling, where it has any."""
    path = bundle.quantized / GENERATION_CONFIG
    return json.loads(path.read_text()) if path.is_file() else {}


def finish(bundle: Bundle, description: dict[str, Any], guide: Callable[[Any], Guide]) -> None:
    """Write deploy.json and the README that `guide` makes of it."""
    (bundle.folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    (bundle.folder / README).write_text(render(guide(description), description))


def read_description(folder: Path) -> dict[str, Any]:
    """deploy.json. Raises ModelError where a file is missing, added or not as it was deployed."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        digests = description["digests"]
    except (OSError, ValueError, KeyError) as error:
        path = folder / DESCRIPTION
        raise ModelError(f"{path}: {error!r}", "deploy again: --redo deploy") from error
    added = {name for name in SIDE_FILES if (folder / name).is_file()} - digests.keys()
    for name in (*digests, *sorted(added)):
        path = folder / name
        if name in added or not path.is_file() or artifact.digest(path) != digests[name]:
            raise ModelError(
                f"{path} is not the file that was deployed",
                "a tokenizer of another model gives other tokens; deploy again: --redo deploy",
            )
    return description


def notice(target: str, text: str) -> Notice:
    """A notice of a target's."""
    return Notice(stage="deploy", text=f"{target}: {text}")


def progress(done: int, started: float) -> Progress:
    """So many parts of the work are done; `started` is of time.perf_counter."""
    seconds = round(time.perf_counter() - started, 1)
    return Progress(stage="deploy", done=done, values={"seconds": seconds})


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else artifact.size(path)
