"""What clients of the server ask for: fields, defaults, refusals; and where stop texts end it."""

import pytest

from pippin.engines import Sampling
from pippin.stages.completions import BadRequest, read_request
from pippin.stages.speech import Until

DEFAULTS = Sampling(max_tokens=7, temperature=0.5, seed=3)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return read_request("chat", {"messages": HI, **fields}, DEFAULTS)


def test_what_a_request_leaves_out_is_the_servers_own():
    assert chat().sampling == DEFAULTS
    assert chat(temperature=None, max_tokens=None).sampling == DEFAULTS
    asked = chat(max_tokens=9, temperature=0, top_p=0.5, seed=1)
    assert asked.sampling == Sampling(max_tokens=9, temperature=0, top_p=0.5, seed=1)
    assert chat(max_completion_tokens=5).sampling.max_tokens == 5


def test_parts_of_text_are_joined_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).said == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
    ]


def test_fields_that_change_nothing_are_accepted():
    assert chat(n=1, presence_penalty=0.0, tools=[], response_format={"type": "text"}, user="me")
    assert chat(tools=[], tool_choice="auto", parallel_tool_calls=True, logprobs=False)
    echoed = {"role": "assistant", "content": "", "refusal": None, "annotations": [], "name": "b"}
    echoed["reasoning_content"] = ""
    assert chat(messages=[*HI, echoed]).said == [*HI, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "oracle", "content": "hi"}]}, "messages[0]"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1]"),
        ({"messages": [{**HI[0], "tool_calls": [{"id": "1"}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param):
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [[], "hi", 3, None])
def test_a_body_that_is_no_object(body):
    with pytest.raises(BadRequest):
        read_request("text", body, DEFAULTS)


def test_several_prompts_at_once_are_refused():
    with pytest.raises(BadRequest):
        read_request("text", {"prompt": ["a", "b"]}, DEFAULTS)


@pytest.mark.parametrize(
    ("stops", "pieces", "said", "found"),
    [
        ((), ["ab", "c"], "abc", False),
        (("c",), ["ab", "cd", "e"], "ab", True),
        (("bc",), ["ab", "cd"], "a", True),
        (("bcd",), ["ab", "c", "x"], "abcx", False),
        (("bcd",), ["ab", "c"], "abc", False),
        (("xyz", "b"), ["ax", "yb"], "axy", True),
        (("aab",), ["a", "a", "a", "b"], "a", True),
    ],
)
def test_an_answer_ends_before_a_stop_text(stops, pieces, said, found):
    until = Until(stops)
    heard = [until.add(piece) for piece in pieces]
    assert "".join([*heard, until.end()]) == said
    assert until.found == found


def test_only_what_may_become_a_stop_text_is_held_back():
    until = Until(["###"])
    assert [until.add(piece) for piece in ("one", " #", "# two", "#")] == ["one", " ", "## two", ""]
    assert until.end() == "#"
