"""The fused losses in a training step: DDP's bits with the same loss, and the trajectory of torch's loss."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.ops import FusedCrossEntropyLoss, fused_linear_cross_entropy
from tests.harness import run
from tests.parity import all_stages, assert_same

CLASSES = 50


class Tokens(pl.LightningModule):
    """Predicts the next of some tokens; the head is called, or only its weight is read."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.kind = loss
        self.embedding = nn.Embedding(CLASSES, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.fused = FusedCrossEntropyLoss(torch.linspace(0.5, 1.5, CLASSES), label_smoothing=0.1, inplace=True)

    def loss(self, batch: Tensor) -> Tensor:
        tokens = (batch.abs() * 20).long() % CLASSES
        x = torch.tanh(self.layer(self.embedding(tokens[:, :-1])))
        target = tokens[:, 1:].masked_fill(tokens[:, 1:] == 3, -100)
        weight, smoothing = self.fused.weight, self.fused.label_smoothing
        if self.kind == "inplace":
            return self.fused(self.head(x), target)
        if self.kind == "linear":
            return fused_linear_cross_entropy(
                x,
                self.head.weight,
                target,
                self.head.bias,
                class_weight=weight,
                label_smoothing=smoothing,
                chunk_rows=5,
            )
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), weight, label_smoothing=smoothing)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("loss", ["inplace", "linear"])
def test_fused_losses_train(loss: str) -> None:
    results = run(2, both_precisions, loss)
    assert_same([rank["mixed"] for rank in results])
    assert_same([rank["torch"] for rank in results], exact=False)


def both_precisions(loss: str) -> dict[str, dict]:
    """bf16-mixed beside DDP with the same loss; fp32, accumulating, beside DDP with torch's loss.

    The norm to clip makes 16-bit gradients be summed in fp32, as DDP's are.
    """
    module = partial(Tokens, loss)
    mixed = all_stages(module, {"data": (16, 8), "precision": "bf16-mixed", "gradient_clip_val": 1e6})
    exact = all_stages(module, {"data": (16, 8), "accumulate_grad_batches": 2}, partial(Tokens, "torch"))
    return {"mixed": mixed, "torch": exact}
