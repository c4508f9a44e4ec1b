"""Sizes, docstrings and words of every file: the rules of CONTRIBUTING.md that text alone shows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYTHON = sorted(
    path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "Makefile", "docs/**/*.md", "recipes/**/*.toml", ".ci/*")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
FILE_LINES, FUNCTION_LINES, PARAMETERS = 300, 60, 5
# Words of the places this was written in; the project speaks of itself alone.
FOREIGN = re.compile(r"(?<![\w.])/(?:work|tmp|root|home)/\w|\bshared/(?:facts|cases|sketches)")
SHAPED = re.compile(r"\b[a-z][a-z0-9_]*_([A-Z][A-Z0-9n]*)\b")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(params=SOURCES, ids=name)
def source(request):
    return request.param


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_are_short(source):
    lines = len(source.read_text().splitlines())
    assert lines <= FILE_LINES, f"{lines} lines: cut it along what it does"


def test_functions_are_short(source):
    long = {
        f.name: f.end_lineno - f.lineno + 1
        for f in functions(source)
        if f.end_lineno - f.lineno >= FUNCTION_LINES
    }
    assert long == {}


def test_functions_take_few_parameters(source):
    """More than five are a dataclass; self, *args and what a caller's protocol dictates aside."""
    many = {}
    for f in functions(source):
        taken = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
        count = len([a for a in taken if a not in ("self", "cls", "ctx")])
        kernel = "triton.jit" in map(ast.unparse, f.decorator_list)  # pointers and strides alone
        if count > PARAMETERS and not f.args.kwarg and not kernel:
            many[f.name] = count
    assert many == {}


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_files_open_with_what_they_are_for(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, "no docstring"
    assert doc.splitlines()[0].endswith((".", ":")), "the first line is a sentence"


def test_shaped_names_come_with_their_legend(source):
    text = source.read_text()
    tree = ast.parse(text)
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    if any(SHAPED.fullmatch(n) for n in names):
        doc = (ast.get_docstring(tree) or "").lower()
        assert "letters" in doc or "legend" in doc, "tensor names without a legend"


def test_nobody_catches_everything(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            assert caught not in ("", "Exception"), f"line {node.lineno}: name what you expect"
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            assert caught != "BaseException" or raises, f"line {node.lineno}: raise it again"


def test_public_things_are_explained(source):
    tree = ast.parse(source.read_text())
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    bare = [node.name for node in public if not ast.get_docstring(node)]
    assert bare == []


def test_lists_of_names_are_sorted(source):
    for node in ast.parse(source.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [ast.unparse(t) for t in targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
            assert list(names) == sorted(names), "__all__ is sorted"


@pytest.mark.parametrize("path", [*PYTHON, *TEXTS], ids=name)
def test_no_word_of_the_workshop(path):
    if path == Path(__file__):
        pytest.skip("names what it looks for")
    found = [line for line in path.read_text().splitlines() if FOREIGN.search(line)]
    assert found == []


@pytest.mark.parametrize("path", [*PYTHON, *TEXTS], ids=name)
def test_nothing_is_left_for_later(path):
    if path == Path(__file__):
        pytest.skip("names what it looks for")
    assert not re.search(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
