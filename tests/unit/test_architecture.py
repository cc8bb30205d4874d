"""The shape of the package: who may import whom, and what no file may contain."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_zero"
# Stubs stand for compiled modules.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for pattern in ("*.pyi", "*.py")
    for path in sorted(PACKAGE.rglob(pattern))
}
CODE_FILES = [
    path
    for folder in ("lightning_zero", "tests", "examples", "benchmarks")
    for pattern in ("*.py", "*.cpp", "*.hpp", "*.h", "*.cu", "*.txt", "*.yaml")
    for path in sorted((ROOT / folder).rglob(pattern))
]
MAX_LINES = 600

UPPER_PARTS = ("partition", "offload", "activations", "checkpoint", "callbacks", "precision", "strategy")
# Part of the package -> parts it must not know. A module is a part too.
FORBIDDEN = {
    "config": ("comm", "ops", *UPPER_PARTS),
    "comm": ("ops", *UPPER_PARTS),
    "ops": ("comm", *UPPER_PARTS),
    "partition": ("offload", "activations", "checkpoint", "callbacks", "precision", "strategy"),
    "partition.layout": ("comm", "ops", "partition.unit", "partition.engine"),
    "offload": ("activations", "checkpoint", "callbacks", "precision", "strategy"),
    "activations": ("offload", "checkpoint", "callbacks", "strategy"),
    "checkpoint": ("activations", "callbacks", "strategy"),
    "uneven": ("offload", "activations", "checkpoint", "callbacks", "precision", "strategy"),
    "strategy": ("callbacks",),
}

COLLECTIVES = {
    "P2POp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}


def imported_modules(name: str, path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the modules of this package that a module imports, wherever in the file it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                module = f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
                if module in MODULES:
                    yield module


def collective_uses(tree: ast.AST) -> Iterator[str]:
    """Yield every mention of a collective reached through torch.distributed."""
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in aliases:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from (f"line {node.lineno}: {alias.name}" for alias in node.names if alias.name in COLLECTIVES)


def belongs_to(module: str, part: str) -> bool:
    full = f"lightning_zero.{part}"
    return module == full or module.startswith(full + ".")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.AST]:
    return {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


@pytest.fixture(scope="module")
def graph(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    return {name: set(imported_modules(name, MODULES[name], tree)) - {name} for name, tree in trees.items()}


def test_the_package_is_there() -> None:
    assert "lightning_zero" in MODULES


def test_imports_have_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(error.args[1]))


def test_imports_run_one_way(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        for part, unknown in FORBIDDEN.items()
        if belongs_to(module, part) and any(belongs_to(other, name) for name in unknown)
    ]
    assert not wrong


def test_collectives_go_through_one_door(trees: dict[str, ast.AST]) -> None:
    uses = {name: list(collective_uses(tree)) for name, tree in trees.items() if name != "lightning_zero.comm"}
    assert {name: found for name, found in uses.items() if found} == {}


def test_no_assert_statements(trees: dict[str, ast.AST]) -> None:
    # They vanish under `python -O`, and their text rarely says what to do.
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found


def test_files_are_short() -> None:
    lengths = {path: path.read_bytes().count(b"\n") for path in CODE_FILES if PACKAGE in path.parents}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_code_is_ascii() -> None:
    assert [str(path.relative_to(ROOT)) for path in CODE_FILES if not path.read_bytes().isascii()] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed as d\nd.barrier()",
        "from torch.distributed import all_gather_object",
    ],
)
def test_a_collective_is_recognised(source: str) -> None:
    assert list(collective_uses(ast.parse(source)))


def test_other_uses_of_torch_distributed_are_free() -> None:
    source = "import torch.distributed as dist\ndist.get_rank()\nstrategy.broadcast(x)"
    assert not list(collective_uses(ast.parse(source)))
