"""`pippin serve` as a client sees it: OpenAI's own, against the command in a process of its own."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.tiny_runs import write_speaking_model

pytestmark = [pytest.mark.torch]

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
HI: Any = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, the address it says, and the model behind it."""

    process: subprocess.Popen[str]
    url: str
    model: Path

    def client(self) -> openai.OpenAI:
        """OpenAI's own, which is told this server's address."""
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    def raw(self, body: bytes, **headers: str) -> tuple[int, str]:
        """Status and text of a request that no client would send."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        address = self.url.split("/")[2]
        with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
            connection.request("POST", "/v1/chat/completions", body, names)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_speaking_model(tmp_path_factory.mktemp("serve") / "small")
    settings = model / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    settings.write_text(json.dumps({**kept, "chat_template": TEMPLATE}))
    command = [sys.executable, "-m", "pippin", "serve", str(model), "--port", "0"]
    command += ["--max-tokens", "6"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http" in line)
        url = next(word for word in line.split() if word.startswith("http")).rstrip(";")
        yield Server(process=process, url=url, model=model)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()


def test_the_model_has_its_folders_name(server):
    assert [model.id for model in server.client().models.list()] == ["small"]


def test_an_answer_is_the_one_that_generate_prints(server, pippin):
    said = server.client().chat.completions.create(model="any", messages=HI)
    code, out, _ = pippin("generate", server.model, "hi", "--max-tokens", "6")
    assert code == 0
    assert said.choices[0].message.content == out[:-1]
    assert said.choices[0].finish_reason == "length"
    assert said.usage.completion_tokens == 6
    assert said.usage.prompt_tokens == len("hi\n")


def test_a_stream_says_the_same_and_counts(server):
    ask = server.client().chat.completions.create
    whole = ask(model="any", messages=HI)
    options = {"include_usage": True}
    chunks = list(ask(model="any", messages=HI, stream=True, stream_options=options))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_a_text_is_gone_on_with_as_it_is(server):
    said = server.client().completions.create(model="any", prompt="abc", max_tokens=4)
    assert said.usage.prompt_tokens == len("abc")
    cut = said.choices[0].text[1:2]
    again = server.client().completions.create(model="any", prompt="abc", max_tokens=4, stop=cut)
    assert again.choices[0].finish_reason == "stop"
    assert again.choices[0].text == said.choices[0].text.partition(cut)[0]


def test_a_prompt_without_room_is_told_before_a_stream_begins(server):
    long: Any = [{"role": "user", "content": "x" * 500}]
    with pytest.raises(openai.BadRequestError, match="501 tokens long"):
        server.client().chat.completions.create(model="any", messages=long, stream=True)


def test_nothing_that_was_said_is_left_out(server):
    talk: Any = [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y" * 50}]
    said = server.client().chat.completions.create(
        model="any", messages=[*talk, *HI], max_tokens=60
    )
    assert said.usage.prompt_tokens == 105
    assert said.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="207 tokens long"):
        server.client().chat.completions.create(model="any", messages=[*talk, *talk, *HI])


def test_what_is_not_supported_is_named(server):
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(model="any", messages=HI, n=2)
    assert refused.value.param == "n"


def test_several_at_once_are_answered_one_after_another(server):
    ask = server.client().chat.completions.create
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: ask(model="any", messages=HI), range(4)))
    assert len({answer.choices[0].message.content for answer in said}) == 1


def test_a_client_that_leaves_does_not_stop_the_others(server):
    with server.client().chat.completions.create(
        model="any", messages=HI, max_tokens=100, stream=True
    ) as stream:
        next(iter(stream))
    assert server.client().chat.completions.create(model="any", messages=HI)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'"hi"'])
def test_a_body_that_is_no_request(server, body):
    status, text = server.raw(body, content_type="application/json")
    assert status == 400
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


def test_a_web_page_of_elsewhere_gets_nothing(server):
    body = json.dumps({"messages": HI}).encode()
    assert server.raw(body, content_type="text/plain")[0] == 400
    assert server.raw(body, content_type="application/json", host="elsewhere.example")[0] == 400
    assert server.raw(body, content_type="application/json", host="[::1]:80")[0] == 200


def test_a_port_in_use_is_told_before_the_model_is_loaded(pippin, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = pippin("serve", tmp_path / "none", "--port", port)
    assert (code, err.count("\n")) == (2, 2)
    assert f"port {port}" in err
