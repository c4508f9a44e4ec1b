"""Sizes, docstrings and words of every file: the rules of CONTRIBUTING.md that text alone shows."""

import ast
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
LATER = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
# All but this file, which names what it looks for.
READ = [path for path in (*PYTHON, *TEXTS) if path != Path(__file__)]


def faults(paths: Iterable[Path], rule: Callable[[Path], Any]) -> dict[str, Any]:
    """What a rule finds, by file; nothing is what is asked for."""
    found = {str(path.relative_to(ROOT)): rule(path) for path in paths}
    return {name: fault for name, fault in found.items() if fault}


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short():
    def rule(path):
        lines = len(text_of(path).splitlines())
        return lines if lines > FILE_LINES else None

    assert faults(SOURCES, rule) == {}, "cut it along what it does"


def test_functions_are_short():
    def rule(path):
        sizes = {f.name: f.end_lineno - f.lineno + 1 for f in functions(path)}
        return {name: size for name, size in sizes.items() if size > FUNCTION_LINES}

    assert faults(SOURCES, rule) == {}


def test_functions_take_few_parameters():
    """More than five are a dataclass; self, *args and what a caller's protocol dictates aside."""

    def rule(path):
        many = {}
        for f in functions(path):
            taken = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
            count = len([a for a in taken if a not in ("self", "cls", "ctx")])
            said = map(ast.unparse, f.decorator_list)
            kernel = any(each.startswith("triton.jit") for each in said)  # pointers, strides
            if count > PARAMETERS and not f.args.kwarg and not kernel:
                many[f.name] = count
        return many

    assert faults(SOURCES, rule) == {}


def test_files_open_with_what_they_are_for():
    def rule(path):
        doc = ast.get_docstring(tree_of(path))
        return None if doc and doc.splitlines()[0].endswith((".", ":")) else "no sentence on top"

    assert faults(PYTHON, rule) == {}


def test_shaped_names_come_with_their_legend():
    def rule(path):
        names = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
        names |= {a.arg for a in nodes(path) if isinstance(a, ast.arg)}
        doc = (ast.get_docstring(tree_of(path)) or "").lower()
        if "letters" in doc or "legend" in doc:
            return None
        return [n for n in names if SHAPED.fullmatch(n)]

    assert faults(SOURCES, rule) == {}


def test_nobody_catches_everything():
    """Not `Exception`; and who catches BaseException raises it again."""

    def rule(path):
        return [
            node.lineno
            for node in nodes(path)
            if isinstance(node, ast.ExceptHandler) and _too_much(node)
        ]

    assert faults(SOURCES, rule) == {}


def _too_much(node: ast.ExceptHandler) -> bool:
    caught = ast.unparse(node.type) if node.type else ""
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
    return caught in ("", "Exception") or (caught == "BaseException" and not raises)


def test_public_things_are_explained():
    def rule(path):
        return [
            node.name
            for node in tree_of(path).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]

    assert faults(SOURCES, rule) == {}


def test_lists_of_names_are_sorted():
    def rule(path):
        assigned = [n for n in tree_of(path).body if isinstance(n, ast.Assign)]
        lists = [n for n in assigned if [ast.unparse(t) for t in n.targets] == ["__all__"]]
        names = [list(ast.literal_eval(n.value)) for n in lists]
        return [some for some in names if some != sorted(some)]

    assert faults(SOURCES, rule) == {}


def test_no_word_of_the_workshop():
    def rule(path):
        return [line for line in text_of(path).splitlines() if FOREIGN.search(line)]

    assert faults(READ, rule) == {}


def test_nothing_is_left_for_later():
    assert faults(READ, lambda path: LATER.findall(text_of(path))) == {}
