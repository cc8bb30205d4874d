"""On a real device whose memory is capped: the largest GPT, plain, with the step on the host, and with parameters there too."""

from pathlib import Path
from typing import Any

import pytest

from lightning_zero import OffloadConfig, ZeroStrategy
from tests.gpu.models import count, fits

CAP, WIDTH, MOST = 2**30, 512, 192
WAYS: dict[str, Any] = {
    "plain": lambda: "auto",
    "stage 2, offload": lambda: ZeroStrategy(stage=2, offload=True),
    "stage 3, parameters on the host": lambda: ZeroStrategy(stage=3, offload=OffloadConfig(parameters="cpu")),
}


def largest(way: str, folder: Path) -> int:
    """The largest number of blocks that trains, to an eighth."""
    passed, failed = 0, MOST + 1
    blocks = 8
    while failed - passed > max(1, passed // 8):
        if fits(WIDTH, blocks, WAYS[way](), CAP, folder):
            passed = blocks
        else:
            failed = blocks
        blocks = min(MOST, 2 * blocks) if failed > MOST else (passed + failed) // 2
        if passed == MOST:
            break
    return passed


def test_capacity(tmp_path: Path, record_property: Any) -> None:
    """Bytes on the device per parameter of AdamW with bf16-mixed, at one rank: 16 plain; 2 of weights and 2 of gradients with
    offload; of stage 3 with parameters on the host only the units in use. Activations and the library's workspace come on
    top, and are the same for all."""
    found = {way: largest(way, tmp_path) for way in WAYS}
    for way, blocks in found.items():
        record_property(way, f"{blocks} blocks, {count(WIDTH, blocks) / 1e6:.0f}M parameters")
    plain, step, all_of_it = found.values()
    print(found)
    assert plain >= 8
    assert step >= 2.5 * plain
    assert all_of_it >= min(MOST, 1.5 * step)


@pytest.mark.parametrize("way", WAYS)
def test_a_cap_is_a_cap(tmp_path: Path, way: str) -> None:
    """The search above ends for the right reason: with next to no memory nothing trains."""
    assert not fits(WIDTH, 8, WAYS[way](), 2**24, tmp_path)
