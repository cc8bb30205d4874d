"""The console script: what it prints, what it refuses, and its exit codes."""

import doctest
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero import cli, disk, doctor, formulas, meta, ops
from lightning_zero.ops._native import ISA_VARIABLE
from tests.fresh import environment

ROOT = Path(__file__).parents[2]


class Enormous(nn.Module):
    """Four terabytes, were it allocated."""

    def __init__(self, width: int = 10**6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)


def not_a_module() -> int:
    return 1


@pytest.fixture(autouse=True)
def fresh_choice_of_isa() -> Iterator[None]:
    ops.native_isa.cache_clear()
    yield
    ops.native_isa.cache_clear()


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a table by their label."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def test_docstrings_say_what_happens() -> None:
    assert doctest.testmod(formulas) == (0, 1)


def test_estimate_prints_the_table_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "7.5B", "--ranks", "64", "--precision", "16-mixed"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Memory per rank in GB: 7.5B parameters, 64 ranks, 16-mixed\n")
    assert max(map(len, text.splitlines())) <= 80
    assert rows(text)["model states"] == ["120.00", "31.41", "16.64", "1.88"]
    assert rows(text)["bytes"] == ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]


def test_estimate_and_plan_with_shard_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "7.5B", "--ranks", "64", "--shard-group-size", "8"]) == 0
    text = capsys.readouterr().out
    assert "64 ranks in groups of k = 8" in text
    # 16P, 4P + 12P/8, 2P + 14P/8 and 16P/8 bytes; plain data parallelism of bf16-mixed holds 16P.
    assert rows(text)["model states"] == ["120.00", "41.25", "28.12", "15.00"]
    assert rows(text)["bytes"] == ["16P", "4P + 12P/k", "2P + 14P/k", "16P/k"]
    memory = ["--device-memory", "40GB", "--host-memory", "512GB", "--nodes", "8"]
    assert cli.main(["plan", "7.5B", "--ranks", "64", "--shard-group-size", "8", *memory]) == 0
    assert "shard_group_size: 8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["estimate", "7.5B", "--ranks", "64", "--shard-group-size", "7"])
    assert "shard_group_size=7 does not divide the 64 ranks" in capsys.readouterr().err


def test_estimate_of_several_rank_counts_and_chosen_stages(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["estimate", "1B", "--ranks", "4", "8", "--stage", "3", "--precision", "32-true"])
    four, eight = capsys.readouterr().out.split("\n\n")
    assert rows(four)["model states"] == ["4.00"]
    assert rows(eight)["model states"] == ["2.00"]


def test_estimate_with_offload_says_where_things_rest(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["estimate", "1B", "--ranks", "4", "--stage", "0", "2", "--offload"])
    table = rows(capsys.readouterr().out)
    assert table["on the host"] == ["0", "3.50"]
    assert table["on the device"] == ["16.00", "2.00"]


def test_a_module_is_built_without_allocating(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}:Enormous"
    cli.main(["estimate", path, "--ranks", "1000", "--precision", "32-true", "--optimizer-states", "0"])
    assert rows(capsys.readouterr().out)["model states"] == ["8.00", "8.00", "4.00", "0.01"]
    cli.main(["estimate", path, "--init-args", '{"width": 1000}'])
    assert "1M parameters" in capsys.readouterr().out
    assert meta.build_on_meta(path).layer.weight.device == torch.device("meta")


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_config_of_hugging_face_is_a_model(tmp_path: Path, as_folder: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """7B parameters of Llama's shape: embedding and head 32000 x 4096 each, and 32 layers of four 4096 x 4096 and three
    4096 x 11008 matrices and two norms; one norm more."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = meta.build_from_config(str(tmp_path if as_folder else file))
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert sum(p.numel() for p in model.parameters()) == 2 * 32000 * 4096 + 32 * layer + 4096 == 6_738_415_616
    assert cli.main(["estimate", str(file)]) == 0
    assert "6.738B parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lots"], "'lots' is not a number of parameters such as 7.5B, 350M or 1e9"),
        (["7.5X"], "'7.5X' is not a number of parameters"),
        (["0"], "must be at least 1 and finite, got '0'"),
        (["inf"], "is not a number of parameters|must be at least 1 and finite"),
        (["no_such_package:Model"], "cannot import 'Model' from 'no_such_package': No module named"),
        (["torch.nn:NoSuchClass"], "cannot import 'NoSuchClass' from 'torch.nn'"),
        (["torch.nn:Linear"], r"torch.nn:Linear could not be built .*TypeError: .*in_features"),
        ([f"{__name__}:not_a_module"], "must give a torch.nn.Module, got int"),
        (["torch.nn:Linear", "--init-args", "{"], "--init-args must be a JSON object, got '{'"),
        (["torch.nn:Linear", "--init-args", "[1]"], r"--init-args must be a JSON object, got '\[1\]'"),
        (["no_such_folder/config.json"], "there is no file 'no_such_folder/config.json'"),
        (["1B", "--ranks", "0"], "world_size must be an integer of at least 1, got 0"),
        (["1B", "--precision", "8-bit"], "precision must be one of 32-true, .*, got '8-bit'"),
        (["1,5B", "--backend", "mpi"], "invalid choice: 'mpi'"),
        (["1B", "--stage", "4"], "invalid choice: 4"),
    ],
)
def test_bad_input_ends_with_a_message_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main(["estimate", *arguments])
    assert info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_plan_prints_a_table_reasons_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    big = ["plan", "7.5B", "--ranks", "64", "--nodes", "8", "--host-memory", "512GB"]
    assert cli.main([*big, "--device-memory", "32GB"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert rows(text)["stage 1"] == ["29.53", "0", "31.41", "0", "no"]
    assert "stage 2 fits and leaves 15.26 GB on each device for everything else." in text
    assert text.endswith("class_path: lightning_zero.ZeroStrategy\n    init_args:\n      stage: 2\n")
    assert cli.main([*big, "--device-memory", "100MB"]) == 1
    assert "Nothing fits." in capsys.readouterr().out


def test_plan_of_a_module_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{__name__}:Enormous"
    arguments = ["--ranks", "1", "--accelerator", "cpu", "--activations", "1MB", "--host-memory", "20MB"]
    assert cli.main(["plan", path, "--init-args", '{"width": 1000}', *arguments]) == 0
    assert "stage 1 fits and leaves 4.00 MB to each rank for everything else." in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        cli.main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out == f"lightning_zero {importlib.metadata.version('lightning_zero')}\n"


def test_doctor_finds_no_problem_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    table = rows(text)
    assert table["torch"] == [importlib.metadata.version("torch")]
    assert "gloo" in table["backends"][0]
    assert table["threads"][0].startswith(f"{torch.get_num_threads()} used by torch")
    isas = ops.available_isas()
    assert table["CPU kernels"][0].startswith(isas[0] if isas else "not built")
    assert text.splitlines()[-1] == "No problem found."


def test_doctor_measures_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DISK_TEST_BYTES", 3 * disk.BLOCK_BYTES)
    assert cli.main(["doctor", "--path", str(tmp_path), "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"writes [\d.]+ .B/s, reads [\d.]+ .B/s, with 25\.17 MB", text)
    assert re.search(r"threads per rank +\d+ for steps on the host, 2 ranks", text)
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert cli.main(["doctor", "--path", str(missing)]) == 1
    assert "PROBLEM:" in capsys.readouterr().out
    with pytest.raises(OSError, match="bytes are free"):
        disk.measure(tmp_path, 2**60)
    assert list(tmp_path.iterdir()) == []


def test_doctor_knows_what_goes_wrong_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"LOCAL_RANK": "0", "SLURM_NTASKS": "4", "LIGHTNING_ZERO_ALWAYS_RELEASE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--ranks", "10000"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    notes = " ".join(text.split())
    assert "note: LOCAL_RANK set: Lightning takes it that somebody else starts the ranks" in notes
    assert "note: inside a SLURM allocation, but not under srun" in notes
    assert "note: LIGHTNING_ZERO_ALWAYS_RELEASE is set" in notes
    assert "note: 10000 ranks share" in notes
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--ranks", "0"])


def test_doctor_names_an_old_and_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(package: str) -> str:
        if package == "rich":
            raise importlib.metadata.PackageNotFoundError(package)
        return "2.4.1" if package == "torch" else real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert cli.main(["doctor"]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
    assert problems == [
        "PROBLEM: torch 2.6 or newer is needed: pip install 'torch>=2.6'",
        "PROBLEM: rich 12.3 or newer is needed: pip install 'rich>=12.3'",
    ]


def test_doctor_names_an_instruction_set_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "abacus")
    assert cli.main(["doctor"]) == 1
    assert f"PROBLEM: {ISA_VARIABLE}='abacus' is not available here" in capsys.readouterr().out


def test_doctor_knows_the_versions_that_the_package_declares() -> None:
    declared = re.search(r"\ndependencies = \[\n(.*?)\n\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert declared is not None
    assert dict(re.findall(r'"(\w+)>=([\d.]+)"', declared[1])) == doctor.REQUIRED


def test_the_package_runs_as_a_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-zero", "estimate", "1B"])
    with pytest.raises(SystemExit) as info:
        runpy.run_module("lightning_zero", run_name="__main__")
    assert info.value.code == 0
    assert "1B parameters, 8 ranks, bf16-mixed" in capsys.readouterr().out
    assert 'lightning-zero = "lightning_zero.cli:main"' in (ROOT / "pyproject.toml").read_text()


LAZY = """
import sys
sys.argv = ["/usr/bin/lightning-zero"]
from lightning_zero.cli import main
assert main(["estimate", "7.5B", "--offload", "--delayed-update", "--stage", "2"]) == 0
print(*sorted({"torch", "lightning", "numpy"} & set(sys.modules)), "end")
from lightning_zero import ZeroStrategy
from lightning.pytorch.strategies import StrategyRegistry
print(ZeroStrategy.__name__, "zero_2" in StrategyRegistry)
"""


def test_arithmetic_needs_no_torch() -> None:
    """The console script answers without what takes seconds to import; names are there when they are asked for."""
    done = subprocess.run([sys.executable, "-c", LAZY], env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["end", "ZeroStrategy True"]
    # 2 bytes of 7.5B gradients on 8 ranks.
    assert ["delayed", "gradients", "(host)", "1.88"] in [line.split() for line in lines]
