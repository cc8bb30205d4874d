"""Checkpoints of model-parallel groups: each place's part, one folder, resumable at any number of data-parallel ranks."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.parts import parts_of
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, RandomData
from tests.strategy.test_model_parallel import WIDTH, Net

FORMS = ("full", "sharded")


def fit(
    stage: int, form: str, folder: str = ".", ckpt_path: Any = None, epochs: int = 2, saves: bool = False,
    optimizer: str = "adam", tp: int = 2, strategy: dict[str, Any] | None = None, **kwargs: Any,
) -> tuple[Any, Net]:  # fmt: skip
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    module = Net(mesh["tp"].get_group(), optimizer, marked=tp > 1)
    given = ZeroStrategy(
        stage=stage, unit_size_mb=TINY_UNIT_MB, model_parallel=mesh if tp > 1 else None, state_dict_type=form, **(strategy or {})
    )
    callbacks = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_last=True)] if saves else []
    trainer = make_trainer(
        ".", strategy=given, max_epochs=epochs, callbacks=callbacks, gradient_clip_val=0.05,
        **{"enable_checkpointing": saves, **kwargs},
    )  # fmt: skip
    trainer.fit(module, DataLoader(RandomData(24, WIDTH), batch_size=2), ckpt_path=ckpt_path)
    return trainer, module


def state_of(trainer: Any, module: Net) -> dict[str, Tensor]:
    """Whole weights and optimizer state of this rank's part."""
    found = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for index, state in trainer.optimizers[0].state_dict()["state"].items():
        found.update({f"{index}.{name}": torch.as_tensor(value).clone() for name, value in state.items()})
    return found


def broken_and_unbroken(folder: str) -> dict[str, tuple]:
    found = {}
    for stage in STAGES:
        for form in FORMS:
            name = f"stage {stage}, {form}"
            place = os.path.join(folder, name)
            flag = {"precision": "bf16-true"} if stage == 2 else {}
            trainer, module = fit(stage, form, place, epochs=3, saves=True, **flag)
            unbroken = state_of(trainer, module)
            trainer.strategy.remove_checkpoint(os.path.join(place, "epoch=0.ckpt"))
            torch.distributed.barrier()
            kept = sorted(os.listdir(place))
            other = FORMS[form == "full"]  # either form is read, whatever is written
            resumed = state_of(*fit(stage, other, ckpt_path=os.path.join(place, "epoch=1.ckpt"), epochs=3, **flag))
            found[name] = (unbroken, resumed, kept)
    return found


def one_data_parallel_rank(folder: str, names: list[str]) -> dict[str, dict[str, Tensor]]:
    """What two ranks find in checkpoints of 2 x 2."""
    found = {}
    for name in names:
        flag = {"precision": "bf16-true"} if "stage 2" in name else {}
        path = os.path.join(folder, name, "last.ckpt")
        found[name] = state_of(*fit(2, "full", ckpt_path=path, epochs=3, **flag))
    return found


def test_resuming_is_going_on(tmp_path: Path) -> None:
    """Also in the other form, in half precision with masters; and with another number of data-parallel
    ranks, which continue where the others were."""
    results = run(4, broken_and_unbroken, str(tmp_path), timeout=120)
    for rank, by_name in enumerate(results):
        for name, (unbroken, resumed, kept) in by_name.items():
            assert kept == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"], name
            assert unbroken.keys() == resumed.keys()
            differing = [key for key in unbroken if not torch.equal(unbroken[key], resumed[key])]
            assert not differing, f"rank {rank}, {name}: {differing}"
    names = list(results[0])
    for place, by_name in enumerate(run(2, one_data_parallel_rank, str(tmp_path), names, timeout=120)):
        for name, found in by_name.items():
            for key, value in results[place][name][0].items():
                assert torch.equal(found[key], value), f"place {place}, {name}: {key}"
    folder = tmp_path / "stage 3, sharded" / "last.ckpt"
    assert sorted(os.listdir(folder)) == ["model_parallel.json", "mp_rank_00.ckpt", "mp_rank_01.ckpt"]
    assert parts_of(folder) == 2
    # A part is an ordinary checkpoint.
    consolidate(folder / "mp_rank_01.ckpt", tmp_path / "one.ckpt")
    weights = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    plain = torch.load(tmp_path / "stage 3, full" / "last.ckpt" / "mp_rank_01.ckpt", weights_only=True)["state_dict"]
    for key in weights:
        assert torch.equal(weights[key], results[1]["stage 3, sharded"][0][key])
        assert torch.equal(plain[key], results[3]["stage 3, full"][0][key])


def refusals(folder: str) -> dict[str, str]:
    found = {}

    def attempt(name: str, act: Any) -> None:
        try:
            act()
            found[name] = "no error"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    parts, plain = os.path.join(folder, "parts.ckpt"), os.path.join(folder, "plain.ckpt")
    fit(2, "full", epochs=1)[0].save_checkpoint(parts)
    fit(2, "full", epochs=1, tp=1)[0].save_checkpoint(plain)
    attempt("fewer", lambda: fit(2, "full", ckpt_path=parts, tp=1))
    attempt("more", lambda: fit(2, "sharded", ckpt_path=parts, tp=4))
    attempt("of none", lambda: fit(2, "full", ckpt_path=plain))
    attempt("in the background", lambda: fit(2, "full", plugins=[AsyncCheckpointIO()]))
    # One rank cannot write its part: nobody has, and what was there is as it was.
    before = {path: path.stat().st_mtime_ns for path in Path(parts).iterdir()}
    trainer = fit(2, "full", epochs=1)[0]
    if trainer.global_rank == 1:
        trainer.strategy.checkpoint_io.save_checkpoint = _no_room
    attempt("no room", lambda: trainer.save_checkpoint(parts))
    torch.distributed.barrier()  # rank 0 removes what there was
    found["as before"] = str(before == {path: path.stat().st_mtime_ns for path in Path(parts).iterdir()})
    found["left"] = str(sorted(os.listdir(folder)))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        Path(parts, "model_parallel.json").write_text(json.dumps({"model_parallel_size": "two"}))
    torch.distributed.barrier()
    attempt("a broken marker", lambda: fit(2, "full", ckpt_path=parts))
    return found


def _no_room(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    wanted = {
        "fewer": "has the parts of 2 model-parallel ranks, and this run's groups have 1: a part fits only the layers",
        "more": "has the parts of 2 model-parallel ranks, and this run's groups have 4",
        "of none": "is of no model-parallel run, and this run's groups have 2",
        "in the background": "NotImplementedError: Checkpoints with model_parallel are written by the ranks together and not"
        " through a AsyncCheckpointIO",
        "no room": "No space left on device",
        "as before": "True",
        "left": "['parts.ckpt', 'plain.ckpt']",
        "a broken marker": "does not say of how many ranks there are parts",
    }
    for rank, found in enumerate(run(4, refusals, str(tmp_path), timeout=60)):
        assert found.keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found[name], f"rank {rank}, {name}: {found[name]}"
