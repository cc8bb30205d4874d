"""The pages tell the truth: every error message is explained, and what is shown as code runs."""

import ast
import builtins
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from lightning_zero import ZeroStrategy, cli, migration
from tests.harness import run
from tests.pages import run_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TROUBLE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"
"""Stands for what a message says about the case at hand."""


# -- messages ----------------------------------------------------------------------------------------------------------


def template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return HOLE


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def messages() -> Iterator[tuple[str, str]]:
    """Where, and the template of every error that is made and every warning that is given."""
    for path in sorted((ROOT / "lightning_zero").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = ast.unparse(node.func)
            error = isinstance(getattr(builtins, name, None), type) and name.endswith("Error")
            if (error and name != "AssertionError") or name.split(".")[-1] in ("warn", "rank_zero_warn"):
                # An OSError's number comes before its text.
                text = next((text for arg in node.args if pieces(text := words(template(arg)), HOLE)), "")
                if text:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def pieces(text: str, hole: str) -> list[str]:
    return [piece for piece in (part.strip(" .:") for part in text.split(hole)) if len(piece) > 2]


def explained() -> list[list[str]]:
    """The messages of the page: the fixed pieces of the first cell of every row."""
    rows = re.findall(r"^\| `+(.*?)`+ \| ", TROUBLE.read_text(), re.MULTILINE)
    return [pieces(words(row), "...") for row in rows]


def says(message: list[str], row: list[str]) -> bool:
    """Whether a row's pieces come in this order in a message. Its last piece may be the beginning of the message's."""
    position = 0
    text = HOLE.join(message)
    for piece in row:
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return bool(row) and text.startswith(row[0])


MESSAGES = list(messages())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 80


def test_every_message_is_explained() -> None:
    rows = explained()
    missing = [
        f"{where}: {text.replace(HOLE, '...')}"
        for where, text in MESSAGES
        if not any(says(pieces(text, HOLE), row) for row in rows)
    ]
    assert not missing, f"add to {TROUBLE.name}, with what it means:\n" + "\n".join(missing)


def test_no_explanation_is_out_of_date() -> None:
    known = [pieces(text, HOLE) for _, text in MESSAGES]
    symptoms = {"step/wait_seconds"}  # rows of the last table
    stale = [row for row in explained() if not any(says(message, row) for message in known)]
    assert [row for row in stale if row[0] not in symptoms] == []


@pytest.mark.parametrize(
    ("message", "row", "same"),
    [
        (f"stage must be 1, got {HOLE}", "stage must be 1, got ...", True),
        (f"stage must be 1, got {HOLE}. Choose one.", "stage must be 1, got ...", True),
        (f"stage must be 1, got {HOLE}", "stage must be 2, got ...", False),
        (f"{HOLE} must be {HOLE}, got {HOLE}", "... must be ..., got ...", True),
        (f"the stage {HOLE}", "stage ...", False),
    ],
)
def test_messages_are_told_apart(message: str, row: str, same: bool) -> None:
    assert says(pieces(message, HOLE), pieces(row, "...")) is same


# -- tables ------------------------------------------------------------------------------------------------------------


def test_migration_has_the_advice_that_errors_give() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    for name, advice in migration.ADVICE.items():
        assert f"| `{name}` | {advice} |" in page or (f"`{name}`" in page and advice in page), name


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, DeepSpeedStrategy])
def test_migration_knows_every_argument(strategy: type) -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    arguments = set(inspect.signature(strategy.__init__).parameters) - {"self", "kwargs"}  # type: ignore[misc]
    assert {name for name in arguments if f"`{name}`" not in page} - {"stage"} == set()


# -- code --------------------------------------------------------------------------------------------------------------

FENCE = re.compile(r"(?P<before>[^\n]*)\n(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)\n *```", re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
"""The line before a block that cannot run here, with the reason."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    runs: bool


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(path.name, line, match["language"], match["code"], not NOT_RUN.fullmatch(match["before"])))
    return found


BLOCKS = [block for path in PAGES for block in blocks(path)]


def run_all_pages(pages: dict[str, list[tuple[int, str]]]) -> dict[str, str]:
    return {name: run_page(name, code) for name, code in pages.items()}


def test_python_blocks_run() -> None:
    pages: dict[str, list[tuple[int, str]]] = {}
    for block in BLOCKS:
        if block.language == "python" and block.runs:
            pages.setdefault(block.page, []).append((block.line, block.code))
    assert {"README.md", "CONTRIBUTING.md", "migration.md"} <= pages.keys()
    failures = run(2, run_all_pages, pages, timeout=120)
    assert failures[0] == failures[1] == dict.fromkeys(pages, "")


def commands() -> list[Any]:
    lines = [(block, line) for block in BLOCKS if not block.language and block.runs for line in block.code.splitlines()]
    # Words in capitals stand for what the reader has.
    return [
        pytest.param(line, id=f"{block.page}-{line[:40]}")
        for block, line in lines
        if line.startswith("lightning-zero") and not re.search(r" [A-Z]{3,}\b", line.partition("#")[0])
    ]


@pytest.mark.parametrize("line", commands())
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line, comments=True)[1:]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_files_and_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in BLOCKS:
        if block.language or not block.runs:
            continue
        for name in re.findall(r"^make (\w+)", block.code, re.MULTILINE):
            assert f"\n{name}:" in makefile, f"{block.page}:{block.line} names make {name}"
        for name in re.findall(r"(?:examples|benchmarks|tests)/[\w./]*\w", block.code):
            assert (ROOT / name).exists(), f"{block.page}:{block.line} names {name}"


def test_yaml_blocks_build_the_strategy() -> None:
    built = 0
    for block in BLOCKS:
        if block.language == "yaml" and block.runs:
            strategy = yaml.safe_load(block.code)["trainer"]["strategy"]
            assert strategy["class_path"] == "lightning_zero.ZeroStrategy"
            ZeroStrategy(**strategy["init_args"])
            built += 1
    assert built


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_name_arguments_that_there_are(path: Path) -> None:
    text = path.read_text()
    command = re.search(r"^#   python (examples/\w+\.py) fit --config (\S+)$", text, re.MULTILINE)
    assert command is not None
    assert (ROOT / command[1]).exists()
    assert ROOT / command[2] == path
    config = yaml.safe_load(text)
    ZeroStrategy(**config["trainer"].pop("strategy")["init_args"])
    assert set(config["trainer"]) <= set(inspect.signature(Trainer).parameters)
    source = (ROOT / command[1]).read_text()
    for name in config.get("model", {}):
        assert re.search(rf"^        {name}: .* = ", source, re.MULTILINE), name


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f"docs/{path.name}" in readme, f"README.md does not link docs/{path.name}"
