"""Ollama's Modelfile: what its template renders is what the model's own chat template renders.

Go's own text/template is asked where Go is installed.
"""

import json
import re
import shutil
import subprocess

import pytest
from tests.targets.tiny_quantized import CHATML

from pippin.model.tokenizer import load_tokenizer
from pippin.targets.gguf.ollama import find_turns, modelfile

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.gguf]
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Wie groß ist {{ der }} Mond? 月"}
ANSWER = {"role": "assistant", "content": "Big."}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ANSWER, USER],
    [SYSTEM, USER, ANSWER, USER, ANSWER, {"role": "user", "content": "Thanks"}],
]
# With words of its own where nobody gives a system turn, as SmolLM2's.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are {{ '{{' }}.<|im_end|>\n"
    "{% endif %}" + CHATML
)
# The system turn is a part of the first user's, as Gemma's.
FOLDED = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}<start>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ (first if loop.first else '') + m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>model\n{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "folded": FOLDED,
    "no system": NO_SYSTEM,
}
BEYOND = {
    "counts": "{% for m in messages %}{{ loop.index }}: {{ m['content'] }}\n{% endfor %}",
    "shouts": "{% for m in messages %}{{ m['content'] | upper }}\n{% endfor %}",
    "asks": (
        "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('ask') }}{% endif %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/]{% endfor %}"
    ),
}
# text/template, asked about some conversations on stdin.
GO = """package main
import ("encoding/json"; "os"; "strings"; "text/template")
type Message struct{ Role, Content string }
func main() {
	var asked struct { Template string; Conversations [][]Message }
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil { panic(err) }
	parsed := template.Must(template.New("").Parse(asked.Template))
	texts := []string{}
	for _, messages := range asked.Conversations {
		var text strings.Builder
		given := map[string]any{"Messages": messages}
		if err := parsed.Execute(&text, given); err != nil { panic(err) }
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""


@pytest.fixture
def tokenizer(quantized):
    """Makes a tokenizer with a chat template."""

    def make(template):
        folder = quantized()
        (folder / "chat_template.jinja").write_text(template)
        return load_tokenizer(folder)

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_render_what_the_chat_template_renders(tokenizer, tmp_path, name):
    model = tokenizer(TEMPLATES[name])
    turns = find_turns(model)
    asked = [c for c in CONVERSATIONS if turns.system or SYSTEM not in c]
    wanted = [model.render_text(c, generation_prompt=True) for c in asked]
    assert [turns.render(c) for c in asked] == wanted
    assert (turns.system is None) == (name == "no system")
    if go := shutil.which("go"):
        (tmp_path / "main.go").write_text(GO)
        given = json.dumps({"Template": turns.go(), "Conversations": asked})
        command = [go, "run", str(tmp_path / "main.go")]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == wanted


@pytest.mark.parametrize("name", BEYOND)
def test_a_template_of_more_than_turns_is_beyond_it(tokenizer, name):
    model = tokenizer(BEYOND[name])
    assert find_turns(model) is None
    assert modelfile("model.gguf", model, 64, {}) is None


def test_the_file_says_template_stops_and_parameters(tokenizer):
    model = tokenizer(DEFAULT_SYSTEM)
    asked = {"temperature": 0.2, "top_p": 0.9, "top_k": None, "do_sample": True}
    text = modelfile("model.gguf", model, 64, asked)
    # The grammar: a command, then a word, a quoted text or one between three quotes.
    value = r'"""(?:.|\n)*?"""|"[^"\n]*"|[^"\s]+'
    lines = re.findall(rf"(FROM|TEMPLATE|PARAMETER \w+) ({value})\n", text)
    assert "".join(f"{name} {value}\n" for name, value in lines) == text
    found = dict(lines)
    assert found.pop("TEMPLATE") == f'"""{find_turns(model).go()}"""'
    assert found == {
        "FROM": "./model.gguf",
        "PARAMETER num_ctx": "64",
        "PARAMETER temperature": "0.2",
        "PARAMETER top_p": "0.9",
        "PARAMETER stop": '"<|im_end|>"',
    }


def test_without_a_chat_template_the_prompt_is_all(quantized):
    folder = quantized()
    (folder / "chat_template.jinja").unlink()
    text = modelfile("model.gguf", load_tokenizer(folder), 64, {})
    assert 'TEMPLATE """{{ .Prompt }}"""\n' in text
    assert "PARAMETER temperature 0\n" in text
