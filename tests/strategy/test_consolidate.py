"""``lightning-zero consolidate``: the file that state_dict_type='full' would have written, in little memory."""

import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lightning_zero import load_from_checkpoint
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.cli import main
from tests.harness import run
from tests.strategy.test_checkpoint import assert_same_content, load, without_folder
from tests.strategy.test_sharded_checkpoint import Wide, train

CASES = {"32": ("32-true", {"stage": 3}), "half": ("bf16-true", {"stage": 1})}


def save(folder: str) -> None:
    for name, (precision, settings) in CASES.items():
        for form in ("full", "sharded"):
            trainer, _ = train(Wide, precision, {**settings, "state_dict_type": form}, max_epochs=1)
            trainer.save_checkpoint(f"{folder}/{name}-{form}.ckpt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("consolidate")
    run(2, save, str(folder))
    return folder


def test_the_file_equals_the_full_one(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in CASES:
        file = tmp_path / f"{name}.ckpt"
        assert main(["consolidate", str(saved / f"{name}-sharded.ckpt"), str(file)]) == 0
        assert file.name in capsys.readouterr().err  # the progress bar
        for again in (load(file), torch.load(file, weights_only=True, mmap=True)):
            wanted = load(saved / f"{name}-full.ckpt")
            assert_same_content(without_folder(again), without_folder(wanted))
            assert list(again["state_dict"]) == list(wanted["state_dict"])
            assert again["state_dict"]["last.weight"].data_ptr() == again["state_dict"]["first.weight"].data_ptr()
        module = Wide.load_from_checkpoint(file, map_location="cpu")
        assert_same_content(module.state_dict(), {k: v.float() for k, v in wanted["state_dict"].items()} | {
            "norm.num_batches_tracked": wanted["state_dict"]["norm.num_batches_tracked"]})  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["32.ckpt", "half.ckpt"]


def test_a_module_from_a_folder(saved: Path, tmp_path: Path) -> None:
    for name in CASES:
        wanted = Wide.load_from_checkpoint(saved / f"{name}-full.ckpt", map_location="cpu").state_dict()
        for form in ("full", "sharded"):
            module = load_from_checkpoint(Wide, saved / f"{name}-{form}.ckpt", map_location="cpu")
            assert type(module) is Wide
            assert_same_content(module.state_dict(), wanted)
    (tmp_path / "model_parallel.json").write_text('{"model_parallel_size": 2}')
    with pytest.raises(ValueError, match=r"holds the parts of 2 model-parallel ranks: name one of them, such as"):
        load_from_checkpoint(Wide, tmp_path)


class WideOnMeta(Wide):
    """Would be filled by a strategy."""

    def configure_model(self) -> None:
        self.to("meta")


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_module_built_on_the_meta_device_needs_a_trainer(saved: Path) -> None:
    for form in ("full", "sharded"):
        path = saved / f"32-{form}.ckpt"
        with pytest.raises(RuntimeError, match=f"WideOnMeta cannot be made of '{path}' alone: .* Let a Trainer"):
            load_from_checkpoint(WideOnMeta, path, map_location="cpu")


def test_safetensors(saved: Path, tmp_path: Path) -> None:
    for name in CASES:
        file = tmp_path / f"{name}.safetensors"
        consolidate(saved / f"{name}-sharded.ckpt", file)
        assert_same_content(load_file(file), load(saved / f"{name}-full.ckpt")["state_dict"])
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_what_is_refused(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(saved / "32-sharded.ckpt")
    (tmp_path / "there.ckpt").write_text("precious")
    for arguments, message in (
        ((folder, "x.zip"), "'x.zip' must end in .ckpt, .pt, .pth or .safetensors"),
        ((str(tmp_path), "x.ckpt"), f"'{tmp_path}' is not a folder of shards: it has no .metadata"),
        ((folder, str(tmp_path / "there.ckpt")), "there.ckpt' exists already: remove it, or choose another name"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["consolidate", *arguments])
        assert stopped.value.code == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("usage: ")
    assert (tmp_path / "there.ckpt").read_text() == "precious"


def test_a_full_disk(saved: Path, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, old[1]))
    try:
        for ending in ("ckpt", "safetensors"):
            with pytest.raises(OSError, match=f"'{tmp_path}/x.{ending}' could not be written: File too large"):
                consolidate(saved / "32-sharded.ckpt", tmp_path / f"x.{ending}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list(tmp_path.iterdir())
