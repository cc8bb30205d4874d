"""The example notebook in a real kernel: two processes forked from it, and what a notebook cannot start."""

import base64
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.fresh import environment

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SPAWN = """
try:
    pl.Trainer(strategy=ZeroStrategy(start_method="spawn"), accelerator="cpu", devices=2)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def text(cell: Any) -> str:
    """What a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(SPAWN))
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment())
    return code_cells(notebook)


def test_two_processes_train_from_a_kernel(executed: list[Any]) -> None:
    _, _, plan, fit, picture, after, _ = executed
    assert "stage 3 fits and leaves 6.80 MB to each rank for everything else." in text(plan)
    # Tables are text here too, which rich would rather display by itself.
    assert "measured over 48 steps: ZeRO stage 3, 2 ranks" in text(fit)
    (shown,) = picture.outputs
    assert base64.b64decode(shown.data["image/png"]).startswith(b"\x89PNG")
    # The loss of the untrained model is about 7; its weights are whole again.
    words = text(after).split()
    assert float(words[1].strip(",")) < 2
    assert "Parameter of shape (512, 16)" in text(after)


def test_what_a_notebook_cannot_start_is_refused(executed: list[Any]) -> None:
    assert "MisconfigurationException" in text(executed[-1])
    assert "not compatible with an interactive environment" in text(executed[-1])


def test_the_outputs_that_are_shown_are_of_the_present_code(executed: list[Any]) -> None:
    shown = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert text(shown[2]) == text(executed[2])  # the plan
    opening = "predicted: ZeRO stage 3, 2 ranks"
    assert text(shown[3]).split("measured")[0] == text(executed[3]).split("measured")[0]
    assert opening in text(shown[3])
