"""The README's table of what works and what is refused is that of tests/promises.py, whose tests exist."""

import ast
from pathlib import Path

import pytest

from tests import promises

STRATEGY = Path(__file__).parents[1] / "strategy"


def test_the_table_is_up_to_date() -> None:
    text = promises.README.read_text()
    assert promises.written(text) == text, "run `python -m tests.promises`"


def names(path: Path) -> set[str]:
    """What can be the name of a test or of its case: functions, classes that are trained, keys of dictionaries."""
    tree = ast.parse(path.read_text())
    found = {"*"} if any(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in tree.body) else set()
    for node in tree.body:
        cases = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and any(
            isinstance(name, ast.Name) and name.id == "case" for name in node.decorator_list
        )
        if cases or (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
            found.add(node.name)
    # Classes that a list, a dictionary or the arguments of a call hand to a test.
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id[0].isupper()}
    keys = (key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys)
    return found | {str(key.value) for key in keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize("promise", promises.tests())
def test_each_promise_has_a_test(promise: str) -> None:
    file, _, name = promises.tests()[promise].partition("::")
    assert name in names(STRATEGY / file)
