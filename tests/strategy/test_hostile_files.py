"""Checkpoints that are broken, or made to do harm: an error on all ranks that names the file, and nothing else happens."""

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lightning_zero import load_from_checkpoint
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.reading import is_inside
from lightning_zero.pretrained import load_pretrained
from tests.harness import run
from tests.parity import rank
from tests.strategy.test_checkpoint_misfits import FORMS, Net, fitted, save

TRAP = "trap"
"""The folder that hostile files try to make; in the tests' working directory."""


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (TRAP,)


Damage = Callable[[Path], None]


def cut(name: str, keep: float) -> Damage:
    def damage(path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])

    return damage


def flip(name: str, find: bytes = b"") -> Damage:
    """Turn over the bits of some bytes, in the middle or where ``find`` is."""

    def damage(path: Path) -> None:
        file = path / name if name else path
        data = bytearray(file.read_bytes())
        start = data.index(find) if find else len(data) // 2
        data[start : start + 40] = bytes(255 - byte for byte in data[start : start + 40])
        file.write_bytes(data)

    return damage


def content(name: str, value: Any) -> Damage:
    """``value`` in the place of what is there: bytes, or what a pickle is made of."""

    def damage(path: Path) -> None:
        file = path / name if name else path
        if isinstance(value, bytes):
            file.write_bytes(value)
        else:
            torch.save(value, file)

    return damage


def pickled(name: str, value: Any) -> Damage:
    return content(name, pickle.dumps(value))


def edit(change: Callable[[dict], Any], name: str = "") -> Damage:
    """Change what is in a file of torch.save."""

    def damage(path: Path) -> None:
        file = path / name if name else path
        inside = torch.load(file, weights_only=False)
        change(inside)
        torch.save(inside, file)

    return damage


def metadata(change: Callable[[Metadata], Any]) -> Damage:
    def damage(path: Path) -> None:
        inside = pickle.loads((path / ".metadata").read_bytes())
        change(inside)
        (path / ".metadata").write_bytes(pickle.dumps(inside))

    return damage


def state(checkpoint: dict) -> dict:
    return checkpoint["optimizer_states"][0]["state"]


# damage -> what the error says
FILES: dict[str, tuple[Damage, str]] = {
    "empty": (cut("", 0), ""),
    "cut early": (cut("", 0.1), ""),
    "cut in the middle": (cut("", 0.5), ""),
    "cut at the end": (cut("", 0.99), ""),
    "noise": (content("", os.urandom(4096)), ""),
    "text": (content("", b"hello"), ""),
    "pickle flipped": (flip("", b"pytorch-lightning_version"), ""),
    "code": (content("", Evil()), "Weights only load failed"),
    "code in a plain pickle": (pickled("", Evil()), "Weights only load failed"),
    "code among weights": (edit(lambda c: c["state_dict"].update(evil=Evil())), "Weights only"),
    "code among callbacks": (edit(lambda c: c.update(callbacks={"evil": Evil()})), "Weights only"),
    "a list": (content("", [1, 2]), "holds list instead of Lightning's dict"),
    "no weights": (edit(lambda c: c.pop("state_dict")), "does not fit the module: KeyError: 'state_dict'"),
    "weights in a list": (edit(lambda c: c.update(state_dict=[torch.ones(2)])), "its 'state_dict' is list"),
    "a weight that is a number": (
        edit(lambda c: c["state_dict"].update({"first.weight": 3})),
        "does not fit the module: .*first.weight",
    ),
    "a weight of another shape": (
        edit(lambda c: c["state_dict"].update({"first.weight": torch.ones(2)})),
        "size mismatch for first.weight",
    ),
    "no version": (edit(lambda c: c.pop("pytorch-lightning_version")), "it has no 'pytorch-lightning_version'"),
    "a version that is a number": (
        edit(lambda c: c.update({"pytorch-lightning_version": 3})),
        "'pytorch-lightning_version' is int instead of str",
    ),
    "loops": (edit(lambda c: c.update(loops=3)), "its 'loops' is int"),
    "no groups": (
        edit(lambda c: c["optimizer_states"][0].pop("param_groups")),
        "'param_groups' are no list of groups",
    ),
    "moment of another shape": (
        edit(lambda c: state(c)[0].update(exp_avg=torch.ones(3, 3))),
        r"'exp_avg' of parameter 0 is of shape \(3, 3\), the parameter is of shape \(7, 6\)",
    ),
    "moment of no shape": (
        edit(lambda c: state(c)[0].update(exp_avg=torch.tensor(float("nan")))),
        r"'exp_avg' of parameter 0 is of shape \(\)",
    ),
    "moment that is text": (edit(lambda c: state(c)[0].update(exp_avg="much")), "'exp_avg' of parameter 0 is str"),
    "moment missing": (edit(lambda c: state(c)[0].pop("exp_avg")), "'exp_avg' of parameter 0 is missing"),
    "state that is a list": (
        edit(lambda c: c["optimizer_states"][0].update(state=[1])),
        "'state' is no dict by parameter",
    ),
    "states that are a number": (
        edit(lambda c: c.update(optimizer_states=3)),
        "'optimizer_states' is int instead of list",
    ),
    "masters": (edit(lambda c: c.update(lightning_zero=3)), "master weights are int"),
}


def size(key: str, value: Any) -> Damage:
    def change(meta: Metadata) -> None:
        meta.state_dict_metadata[key].size = value

    return metadata(change)


def places(change: Callable[[MetadataIndex, _StorageInfo], _StorageInfo | None]) -> Damage:
    def damage(meta: Metadata) -> None:
        changed = {index: change(index, info) for index, info in meta.storage_data.items()}
        meta.storage_data = {index: info for index, info in changed.items() if info is not None}

    return metadata(damage)


def first_file(meta: Metadata, key: str = "model.first.weight") -> tuple[str, int, int]:
    info = next(info for index, info in meta.storage_data.items() if index.fqn == key)
    return info.relative_path, info.offset, info.length


def blob(value: Any) -> Damage:
    """Another value in the bytes of the first box of a weight."""

    def damage(path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        inside = pickle.loads((path / ".metadata").read_bytes())
        shutil.copy(path / first_file(inside)[0], path / "other.distcp")
        (path / "other.distcp").write_bytes(buffer.getvalue())
        places(
            lambda i, info: (
                replace(info, relative_path="other.distcp", offset=0, length=len(buffer.getvalue()))
                if i.fqn == "model.first.weight"
                else info
            )
        )(path)

    return damage


def enormous(path: Path) -> None:
    def change(meta: Metadata) -> None:
        stored = meta.state_dict_metadata["model.first.weight"]
        stored.size = stored.chunks[0].sizes = torch.Size((10**15, 6))

    metadata(change)(path)
    places(lambda _, info: replace(info, length=10**17))(path)


def without(index: MetadataIndex, info: _StorageInfo) -> _StorageInfo | None:
    return None if index.fqn == "model.first.weight" else info


FOLDERS: dict[str, tuple[Damage, str]] = {
    ".metadata empty": (cut(".metadata", 0), ""),
    ".metadata cut": (cut(".metadata", 0.5), ""),
    ".metadata noise": (content(".metadata", os.urandom(4096)), ""),
    "code in .metadata": (pickled(".metadata", Evil()), "would run .*mkdir.*weights_only=False"),
    "code among planner data": (metadata(lambda m: m.planner_data.update(evil=Evil())), "would run .*mkdir"),
    "a dict for .metadata": (pickled(".metadata", {"state_dict_metadata": {}}), "it holds dict"),
    "no storage data": (metadata(lambda m: setattr(m, "storage_data", None)), "does not say where the tensors are"),
    "a file outside": (
        places(lambda _, info: replace(info, relative_path="../outside.distcp")),
        "'../outside.distcp', which is not inside the folder",
    ),
    "an absolute file": (
        places(lambda _, info: replace(info, relative_path="/etc/hostname")),
        "'/etc/hostname', which is not inside",
    ),
    "a file from a loop": (
        places(lambda _, info: replace(info, relative_path="a/../../outside.distcp")),
        "'a/../../outside.distcp', which is not",
    ),
    "a file that is a number": (places(lambda _, info: replace(info, relative_path=3)), "in 3, which is not inside"),
    "negative offset": (places(lambda _, info: replace(info, offset=-5)), "bytes from -5"),
    "NaN length": (places(lambda _, info: replace(info, length=float("nan"))), "take nan bytes"),
    "offset past the end": (places(lambda _, info: replace(info, offset=10**9)), "__0_0.distcp"),
    "nowhere": (places(without), r"does not say where 'model.first.weight' at \(0, 0\) is"),
    "NaN size": (size("model.first.weight", (float("nan"), 6)), r"shape \(nan, 6\)"),
    "negative size": (size("model.first.weight", torch.Size((-7, 6))), "shape .*-7, 6"),
    "too large": (size("model.first.weight", torch.Size((10**15, 6))), "boxes of 42 elements"),
    "too large, and so its box": (enormous, "memory|bytes, of 1000"),
    "a hole": (metadata(lambda m: m.state_dict_metadata["model.first.weight"].chunks.pop()), "boxes of 0 elements"),
    "no name": (metadata(lambda m: m.planner_data.update({"model.first.weight": ()})), "said to stand at"),
    "a name that is a number": (
        metadata(lambda m: m.planner_data.update({"model.first.weight": 3})),
        "said to stand at 3",
    ),
    "code in a box": (blob(Evil()), "other.distcp.*Weights only"),
    "a box of another shape": (
        blob(torch.ones(2, 2)),
        r"'model.first.weight' is \(2, 2\), torch.float32, and \(7, 6\)",
    ),
    "a box of another dtype": (
        blob(torch.ones(7, 6, dtype=torch.float64)),
        "torch.float64, and .*torch.float32 in .metadata",
    ),
    "a box that is a list": (blob([1] * 100), "is list, and"),
    "shards cut": (cut("__0_0.distcp", 0.5), "__0_0.distcp"),
    "shards flipped": (flip("__1_0.distcp"), "__1_0.distcp"),
    "shards empty": (cut("__1_0.distcp", 0), "__1_0.distcp"),
    "shards missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp"),
    "code in meta.pt": (content("meta.pt", {"evil": Evil()}), "meta.pt.*Weights only"),
    "meta.pt cut": (cut("meta.pt", 0.5), "meta.pt"),
    "meta.pt missing": (lambda path: (path / "meta.pt").unlink(), "has no meta.pt"),
    "meta.pt a list": (content("meta.pt", [1]), "meta.pt.*holds list"),
    "optimizer without groups": (
        metadata(
            lambda m: [
                (m.planner_data.pop(k), m.state_dict_metadata.pop(k))
                for k in list(m.planner_data)
                if "param_groups" in k
            ]
        ),
        "has no 'param_groups' for optimizer 0",
    ),
}
TABLES = dict(zip(FORMS, (FILES, FOLDERS)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    run(2, save, str(folder))
    return folder


def make_all(saved: Path, folder: Path) -> None:
    for form in FORMS:
        for name, (damage, _) in TABLES[form].items():
            path = folder / f"{form} {name}"
            (shutil.copytree if form == "sharded" else shutil.copy)(saved / form, path)
            damage(path)
    (folder / "outside.distcp").write_bytes((saved / "sharded" / "__0_0.distcp").read_bytes())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def resume_all(root: str, good: str) -> dict[str, str]:
    found = {}
    for form in FORMS:
        for name in TABLES[form]:
            path = f"{root}/{form} {name}"
            found[path] = error_of(lambda: fitted(Net, "full", path, max_epochs=2))  # noqa: B023
    for form, name in (("full", "cut in the middle"), ("sharded", ".metadata cut"), ("sharded", "meta.pt cut")):
        own = f"{root}/{form} {name}" if rank() == 1 else f"{good}/{form}"
        found[f"on one, {form} {name}"] = error_of(lambda: fitted(Net, "full", own, max_epochs=2))  # noqa: B023
    found["trap"] = str(os.path.exists(TRAP))
    return found


def test_resuming(saved: Path, tmp_path: Path) -> None:
    make_all(saved, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    results = run(2, resume_all, str(tmp_path), str(saved))
    for number, found in enumerate(results):
        assert found.pop("trap") == "False", "code was run"
        for path, message in found.items():
            if path.startswith("on one"):
                assert path.partition(", ")[2] in message
                assert ("Rank 1 could not load a checkpoint" in message) == (number == 0), message
                continue
            form, _, name = path.rpartition("/")[2].partition(" ")
            assert path in message, f"{name}: {message}"
            assert re.search(f"(?s){TABLES[form][name][1]}", message), f"{name}: {message}"
    assert sorted(tmp_path.rglob("*")) == before


def test_making_a_module(saved: Path, tmp_path: Path) -> None:
    """What is wrong only with what a module does not need is none of its business."""
    make_all(saved, tmp_path)
    made = 0
    for form in FORMS:
        for name in TABLES[form]:
            path = tmp_path / f"{form} {name}"
            message = error_of(lambda: load_from_checkpoint(Net, path))  # noqa: B023
            made += message == "no error"
            known = message == "no error" or message.startswith("RuntimeError: Error(s) in loading state_dict for Net")
            assert known or str(path) in message, f"{name}: {message}"
    assert made < sum(map(len, TABLES.values())) / 3
    assert not os.path.exists(TRAP), "code was run"
    (tmp_path / "empty").mkdir()
    assert "has no .metadata" in error_of(lambda: load_from_checkpoint(Net, tmp_path / "empty"))
    shutil.copytree(saved / "sharded", tmp_path / "part")
    (tmp_path / "part" / "__1_0.distcp").unlink()
    message = error_of(lambda: load_from_checkpoint(Net, tmp_path / "part"))
    assert message == f"FileNotFoundError: The checkpoint '{tmp_path / 'part'}' is not whole: its file '__1_0.distcp' is missing."


def test_consolidating(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_all(saved, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for name, (_, text) in FOLDERS.items():
        for ending in (".ckpt", ".safetensors"):
            message = error_of(lambda: consolidate(tmp_path / f"sharded {name}", tmp_path / f"made{ending}"))  # noqa: B023
            if message == "no error":  # what is wrong is nothing that weights alone need
                assert ending == ".safetensors"
                assert name.startswith(("code in meta", "meta.pt", "optimizer", "shards flipped"))
                (tmp_path / f"made{ending}").unlink()
                continue
            assert f"sharded {name}" in message, f"{name}: {message}"
            assert re.search(f"(?s){text}", message), f"{name}: {message}"
    assert sorted(tmp_path.rglob("*")) == before


def header(data: bytes) -> Damage:
    """Another header in a file of safetensors."""

    def damage(path: Path) -> None:
        (path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))

    return damage


def index(name: str, content: Any) -> Damage:
    def damage(path: Path) -> None:
        (path / "model.safetensors").rename(path / name)
        (path / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))

    return damage


def pickled_weights(value: Any) -> Damage:
    def damage(path: Path) -> None:
        (path / "model.safetensors").unlink()
        torch.save(value, path / "pytorch_model.bin")

    return damage


PRETRAINED: dict[str, tuple[Damage, str]] = {
    "empty": (cut("model.safetensors", 0), "model.safetensors"),
    "cut": (cut("model.safetensors", 0.5), "model.safetensors"),
    "noise": (content("model.safetensors", os.urandom(4096)), "model.safetensors"),
    "a header past the end": (content("model.safetensors", (2**60).to_bytes(8, "little") + b"{}"), "model.safetensors"),
    "a header of no JSON": (header(b"{not json"), "model.safetensors"),
    "offsets past the end": (
        header(b'{"weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,4096]}}'), "model.safetensors",
    ),
    "an unknown dtype": (header(b'{"weight":{"dtype":"F3","shape":[4],"data_offsets":[0,16]}}'), "model.safetensors"),
    "a shape that does not fit": (
        header(b'{"weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,64]}}'), "model.safetensors",
    ),
    "an index of no JSON": (index("a.safetensors", "{"), "index.json"),
    "an index without files": (index("a.safetensors", {}), "index.json.*KeyError: 'weight_map'"),
    "an index that is a list": (index("a.safetensors", [1]), "index.json"),
    "an index to a file outside": (
        index("a.safetensors", {"weight_map": {"weight": "../outside.safetensors"}}), "'../outside.safetensors', which is not",
    ),
    "an index to an absolute file": (index("a.safetensors", {"weight_map": {"weight": "/etc/hostname"}}), "'/etc/hostname'"),
    "an index to a number": (index("a.safetensors", {"weight_map": {"weight": 3}}), "it names 3"),
    "an index to nothing": (index("a.safetensors", {"weight_map": {"weight": "b.safetensors"}}), "b.safetensors.*not exist"),
    "code in a pickle": (pickled_weights({"weight": Evil()}), "pytorch_model.bin.*Weights only"),
    "a list in a pickle": (pickled_weights([1]), "holds list instead of tensors by name"),
    "a number for a tensor": (pickled_weights({"weight": 3}), "'weight' is int instead of a tensor"),
    "no name": (pickled_weights({3: torch.ones(2)}), "3 is Tensor instead of|3 is .*name"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRETRAINED)
def test_weights_of_others(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    layer = nn.Linear(4, 3)
    save_file(layer.state_dict(), folder / "model.safetensors")
    save_file(layer.state_dict(), tmp_path / "outside.safetensors")
    load_pretrained(nn.Linear(4, 3), folder)  # good so far
    damage, text = PRETRAINED[name]
    damage(folder)
    message = error_of(lambda: load_pretrained(nn.Linear(4, 3), folder))
    assert str(folder) in message
    assert re.search(f"(?s){text}", message), message
    assert not os.path.exists(TRAP)


@pytest.mark.parametrize("name", ["a.bin", "b/a.bin", "..a", "a..b/c"])
def test_names_inside(name: str) -> None:
    assert is_inside(name)


@pytest.mark.parametrize(
    "name", ["", "/a", "..", "../a", "b/../../a", "C:/a", "C:a", "b\\..\\..\\a", "\\\\host\\a", "a\0", 3, None]
)
def test_names_outside(name: Any) -> None:
    assert not is_inside(name)
