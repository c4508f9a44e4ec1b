"""Every file format and every way a data file can be wrong."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pippin.data import dataset, holdout, hub
from pippin.data.dataset import data_digest, find_splits, load_split
from pippin.data.shapes import Row
from pippin.errors import DataError
from pippin.recipe import Data

PAIRS = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(30)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load(path: Path, split: str = "train", **keys: Any) -> list[Row]:
    """Rows of a file that is also its own valid and test file, so that none is set aside."""
    data = Data(source=path.name, valid=path.name, test=path.name)
    return load_split(dataclasses.replace(data, **keys), path.parent, split)  # type: ignore


def write(folder: Path, name: str, content: str | bytes | list[Any]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = lines(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def spoken(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages or ()]


def write_csv(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "crlf", "bom", "lined"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": 'a "q",\nünï 🙂', "completion": "x\ty, z"}, *PAIRS]
    text = lines(rows)
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(text)
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind in ("csv", "tsv"):
        write_csv(path, rows, "," if kind == "csv" else "\t")
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path = tmp_path / "rows.jsonl"
        odd = {"crlf": text.replace("\n", "\r\n"), "bom": "\ufeff" + text, "lined": "\n" + text}
        path.write_bytes(odd[kind].encode())
    found = load(path)
    assert [row.pair for row in found] == [(r["prompt"], r["completion"]) for r in rows]
    assert spoken(found[0]) == [("user", rows[0]["prompt"]), ("assistant", rows[0]["completion"])]


def test_where_names_file_and_line(tmp_path: Path) -> None:
    jsonl = write(tmp_path, "a.jsonl", "\n" + lines(PAIRS[:2]))
    assert [row.where for row in load(jsonl)] == ["a.jsonl:2", "a.jsonl:3"]
    table = write(tmp_path, "a.csv", 'prompt,completion\n"two\nlines",x\ny,z\n')
    assert [row.where for row in load(table)] == ["a.csv:2", "a.csv:4"]


SHAPES = [
    (
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        [("system", "s"), ("user", "u")],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]},
        [("user", "u")],
    ),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"x": 1}]}]},
        [("assistant", "")],
    ),
    ({"messages": json.dumps([{"role": "user", "content": "u"}])}, [("user", "u")]),
    (
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
        [("user", "u"), ("assistant", "a")],
    ),
    (
        {"system": "s", "conversations": [{"from": "human", "value": "u"}]},
        [("system", "s"), ("user", "u")],
    ),
    ({"conversations": [{"role": "user", "content": "u"}]}, [("user", "u")]),
    ({"prompt": "[{}]", "completion": "a"}, [("user", "[{}]"), ("assistant", "a")]),
    (
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "completion": [{"role": "assistant", "content": "a"}],
        },
        [("system", "s"), ("user", "u"), ("assistant", "a")],
    ),
    ({"instruction": "do", "input": "", "output": "a"}, [("user", "do"), ("assistant", "a")]),
    (
        {"instruction": "do", "input": "it", "output": "a", "text": "all of it"},
        [("user", "do\n\nit"), ("assistant", "a")],
    ),
]


@pytest.mark.parametrize(("values", "wanted"), SHAPES)
def test_shapes(tmp_path: Path, values: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    (row,) = load(write(tmp_path, "a.jsonl", [values]))
    assert spoken(row) == wanted


def test_tools_and_calls_are_kept(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"messages": messages, "tools": tools},
        {"messages": messages, "tools": json.dumps(tools)},
    ]
    for row in load(write(tmp_path, "a.jsonl", rows)):
        assert row.tools == tools
        assert row.messages is not None
        assert row.messages[0]["tool_calls"] == [call]


def test_parquet_nulls_are_no_keys(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    call = [{"function": {"name": "f"}}]
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": call}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    (row,) = load(path)
    assert row.messages is not None
    assert set(row.messages[0]) == {"role", "content"}
    assert row.messages[1]["content"] == ""


def test_format_given_by_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [{**PAIRS[0], "text": "t"}])
    assert load(path)[0].pair is not None
    assert load(path, format="text")[0].text == "t"


def test_plain_text_is_documents(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\n\r\nstill one\n<|endoftext|>\ntwo\n")
    found = load(path)
    assert [(row.text, row.where) for row in found] == [
        ("one\n\nstill one", "a.txt:1"),
        ("two\n", "a.txt:5"),
    ]
    assert all(row.document for row in found)


FAULTS = [
    ("a.jsonl", b"", "is empty"),
    ("a.jsonl", b" \n\n", "is empty"),
    ("a.jsonl", b'{"text": "x"}\n{"text": x}\n{"text": "y"}\n', r"a\.jsonl:2: not JSON.*column 10"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "y', r"a\.jsonl:2: the file ends in the middle"),
    ("a.jsonl", b'{"text": "x"}\n"y"\n', r"a\.jsonl:2: a row must be an object.*a text"),
    ("a.json", b'[{"text": "x"}, {"te', r"a\.json:1: .*(ends in the middle|Unterminated)"),
    ("a.json", b'[{"text": "x"},', r"a\.json:1: the file ends in the middle"),
    ("a.json", b"[]", "holds no rows"),
    ("a.jsonl", '{"text": "x"}\n{"text": "ü"}\n'.encode("latin-1"), r"a\.jsonl:2: byte 0xfc"),
    ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "UTF-16"),
    ("a.jsonl", b'{"text": "x"}\n{"te\0\0\0\0', r"a\.jsonl:2: a NUL byte"),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', r"a\.jsonl:1: .*surrogate"),
    ("a.jsonl", b'{"text": NaN}\n', r"a\.jsonl:1: 'text' must be a text, this is a number"),
    ("a.jsonl", b'{"messages": []}\n', r"a\.jsonl:1: 'messages' must be a list.*empty list"),
    ("a.jsonl", b'{"messages": [{"role": "asistant", "content": ""}]}', r"turn 1 has the role"),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}', r"'content' must be a text, this is null"),
    ("a.jsonl", b'{"conversations": [{"from": "me", "value": ""}]}', r"turn 1 has the role 'me'"),
    ("a.csv", b"prompt,completion\n", "holds no rows"),
    ("a.csv", b"prompt,completion\na,b\nc\n", r"a\.csv:3: 1 cells, the header names 2"),
    ("a.csv", b'prompt,completion\na,"b', r"a\.csv:2: not CSV"),
    ("a.parquet", b"", "is empty"),
    ("a.parquet", b"PAR1 and then nothing", "not a whole Parquet file"),
    ("a.txt", b"\n", "is empty"),
    ("a.docx", b"x", r"files ending in '\.docx' are not read"),
]


@pytest.mark.parametrize(("name", "content", "message"), FAULTS)
def test_faults(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path, name, content))
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"question": "q", "answer": "a"}, "'question' -> 'prompt', 'answer' -> 'completion'"),
        ({"promt": "q", "completion": "a"}, "'promt' -> 'prompt'"),
        ({"mesages": []}, "'mesages' -> 'messages'"),
        ({"x": 1}, "messages; conversations; prompt/completion"),
    ],
)
def test_unknown_shape_tells_keys_and_names(tmp_path: Path, values: Any, hint: str) -> None:
    with pytest.raises(DataError, match=r"a.jsonl:1: unknown row shape; keys seen: ") as caught:
        load(write(tmp_path, "a.jsonl", [values]))
    assert next(iter(values)) in caught.value.message
    assert hint in caught.value.hint


def test_mixed_shapes(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [PAIRS[0], {"text": "x"}])
    with pytest.raises(DataError, match=r"a.jsonl:2: no 'prompt' .* prompt_completion.*seen: text"):
        load(path)


def test_missing_file_and_typo(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", PAIRS)
    with pytest.raises(DataError, match="there is no file or folder") as caught:
        load_split(Data(source="tran.jsonl"), tmp_path, "train")
    assert caught.value.hint == "did you mean 'train.jsonl'?"


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    path = write(tmp_path, "train.jsonl", PAIRS)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match="no permission to read"):
        load(path)


FOLDERS = [
    ("train.jsonl", "valid.jsonl", "test.jsonl"),
    ("training.json", "validation.json", "testing.json"),
    ("sql.train.jsonl", "sql.dev.jsonl", "sql.test.jsonl"),
    ("my_train.csv", "my_val.csv", "my_test.csv"),
    ("train/a.jsonl", "eval/a.jsonl", "test/a.jsonl"),
    ("data/train-00000-of-00001.jsonl", "data/validation-00000.jsonl", "data/test-0.jsonl"),
]


@pytest.mark.parametrize("names", FOLDERS)
def test_folders(tmp_path: Path, names: tuple[str, str, str]) -> None:
    write(tmp_path, "README.md", "about")
    for number, name in enumerate(names):
        if name.endswith("csv"):
            write_csv(tmp_path / name, [PAIRS[number]])
        else:
            write(tmp_path, name, [PAIRS[number]])
    data = Data(source=str(tmp_path))
    for number, split in enumerate(dataset.SPLITS):
        (row,) = load_split(data, Path("elsewhere"), split)
        assert row.pair == (PAIRS[number]["prompt"], PAIRS[number]["completion"])
        assert find_splits(data, Path())[split] == tmp_path / names[number]


def test_shards_in_order(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, f"train-{number:05}-of-00003.jsonl", [PAIRS[number]])
    write(tmp_path, "valid.jsonl", [PAIRS[9]])
    write(tmp_path, "test.jsonl", [PAIRS[9]])
    data = Data(source=".")
    found = [row.pair for row in load_split(data, tmp_path, "train")]
    assert found == [(p["prompt"], p["completion"]) for p in PAIRS[:3]]
    assert find_splits(data, tmp_path)["train"] == tmp_path


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dev.jsonl", "valid.jsonl", "train.jsonl"), "could all be the valid split"),
        (("train.jsonl", "train.csv"), "could all be the train split"),
        (("test.jsonl",), "no training file; it holds test.jsonl"),
        (("train/a.jsonl", "train/b.csv"), "mixes formats"),
        (("main/train.jsonl", "socratic/train.jsonl"), "several data sets: main, socratic"),
        (("notes.docx",), "holds no data file"),
    ],
)
def test_folder_faults(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for name in names:
        write(tmp_path, name, PAIRS)
    with pytest.raises(DataError, match=message):
        load_split(Data(source="."), tmp_path, "train")


def test_folder_of_notes_is_training_text(tmp_path: Path) -> None:
    for name in ("a.md", "b.md", "README.md"):
        write(tmp_path, name, f"{name} text")
    keys = {"valid": "a.md", "test": "a.md"}
    rows = load_split(Data(source=".", **keys), tmp_path, "train")
    assert [row.text for row in rows] == ["a.md text", "b.md text"]


def test_one_file_is_shared_out(tmp_path: Path) -> None:
    rows = [*PAIRS, *PAIRS[:5], {"prompt": "question 0", "completion": "another"}]
    path = write(tmp_path, "a.jsonl", rows)
    data = Data(source="a.jsonl")
    splits = {name: load_split(data, tmp_path, name) for name in dataset.SPLITS}
    asked = {name: {row.pair[0] for row in found if row.pair} for name, found in splits.items()}
    assert sum(len(found) for found in splits.values()) == len(rows)
    assert [len(asked[name]) for name in dataset.SPLITS] == [26, 2, 2]
    assert not asked["train"] & asked["valid"] | asked["valid"] & asked["test"]
    assert find_splits(data, tmp_path)["valid"] == "set aside from a.jsonl"
    path.write_text(lines(rows[::-1]))
    again = {row.pair[0] for row in load_split(data, tmp_path, "valid") if row.pair}
    assert again == asked["valid"], "the order of the rows must not matter"


def test_one_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    text = "".join(f"SPEAKER {i}:\nwords and words.\n\n" for i in range(100))
    write(tmp_path, "a.txt", text)
    rows = [load_split(Data(source="a.txt"), tmp_path, name)[0] for name in dataset.SPLITS]
    assert "".join(row.text or "" for row in rows) == text
    assert all((row.text or "").startswith("SPEAKER") for row in rows)
    for row in rows:
        first = text.split("\n")[int(row.where.split(":")[1]) - 1]
        assert (row.text or "").startswith(first)


def test_too_few_rows_to_share_out(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", PAIRS[:2])
    assert len(load_split(Data(source="a.jsonl"), tmp_path, "train")) == 2
    with pytest.raises(DataError, match="too few rows to set a valid split aside"):
        load_split(Data(source="a.jsonl"), tmp_path, "valid")


def test_max_rows_shortens_training_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", PAIRS)
    assert len(load(path, max_rows=4)) == 4
    assert len(load(path, "valid", max_rows=4)) == 30


def test_digest_follows_the_contents(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl"):
        write(tmp_path, name, PAIRS)
    data = Data(source=".")
    before = data_digest(data, tmp_path)
    assert data_digest(Data(source=str(tmp_path)), Path()) == before
    write(tmp_path, "valid.jsonl", PAIRS[:3])
    assert data_digest(data, tmp_path) != before


def test_hub_id_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    for name in ("train", "test"):
        write(tmp_path, f"main/{name}-00000-of-00001.jsonl", PAIRS)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    data = Data(source="someone/sums/main")
    assert len(load_split(data, tmp_path, "test")) == 30
    assert (asked["repo"], asked["repo_type"]) == ("someone/sums", "dataset")
    assert "main/*.parquet" in asked["allow_patterns"]


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo: str, **options: Any) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(DataError, match=r"no local file or folder, and the hub.*: no network$"):
        load_split(Data(source="some/where"), tmp_path, "train")


def test_what_looks_like_a_hub_id() -> None:
    assert hub.looks_like_hub_id("openai/gsm8k")
    assert hub.looks_like_hub_id("openai/gsm8k/main")
    assert not any(map(hub.looks_like_hub_id, ("data", "../a/b", "/a/b", "~/a/b", "a/b c")))


def test_all_rows_at_fault_are_told_at_once(tmp_path: Path) -> None:
    bad = [{"prompt": i, "completion": "x"} for i in range(7)]
    path = write(tmp_path, "rows.jsonl", [*PAIRS, *bad])
    with pytest.raises(DataError) as caught:
        load(path)
    named = caught.value.message.splitlines()
    assert [line.partition(": ")[0] for line in named[:-1]] == [
        f"rows.jsonl:{n}" for n in range(31, 36)
    ]
    assert named[-1] == "and 2 more"


def test_cells_parted_by_semicolons(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.csv", "prompt;completion\n1,5;b\n")
    with pytest.raises(DataError, match="parted by ';', not by commas"):
        load(path)
    with pytest.raises(DataError, match="parted by ';', not by tabs"):
        load(path.rename(path.with_suffix(".tsv")))


def test_rows_inside_an_object_are_pointed_at(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.json", json.dumps({"name": "x", "data": PAIRS}, indent=1))
    with pytest.raises(DataError) as caught:
        load(path)
    assert caught.value.hint == "if the rows are the list under 'data', save that list alone"


def test_held_out_rows_that_training_asks_too() -> None:
    def row(asked: str, answer: str, where: str = "") -> Row:
        turns = [("system", "s"), ("user", asked), ("assistant", answer)]
        messages = tuple({"role": r, "content": text} for r, text in turns if text)
        return Row(messages=messages, where=where)

    train = [row("a", "1"), row("b", "2"), row("a", "1"), row("", "alone")]
    held_out = [row("c", "1", "t:1"), row("b", "3", "t:2"), row("", "other", "t:3")]
    (text,) = holdout.seen_before(held_out, train, "test")
    assert text.startswith("1 of 3 test rows ask what a training row asks, t:2 first")
    assert holdout.seen_before(held_out[::2], train, "test") == []
    assert holdout.repeated(train) == ["train: 1 row said before, word for word"]
    assert holdout.repeated(train[:2]) == []
