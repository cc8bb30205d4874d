"""Train a small GPT on the source text of Python's standard library.

    python examples/train_gpt.py fit --config examples/zero3.yaml

The model is an ordinary LightningModule: nothing in this file knows how its parameters, gradients and optimizer state
are spread over the ranks. That is the business of the strategy, which the YAML file names.
"""

import math
import sysconfig
import warnings
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_zero.ops import fused_cross_entropy, fused_linear_cross_entropy

# Tokens are bytes: any text can be encoded, and there is no tokenizer to train or download.
VOCABULARY = 256
# Tables of data rather than text, tests, and whatever is installed beside the standard library.
SKIPPED_FOLDERS = {"dist-packages", "encodings", "pydoc_data", "site-packages", "test", "tests"}


def encode(text: str) -> Tensor:
    # A level of indentation becomes one token; as four spaces each it would fill much of every window.
    return torch.frombuffer(bytearray(text.replace("    ", "\t").encode()), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace").replace("\t", "    ")


class TextWindows(Dataset):
    """Windows of ``context`` tokens, side by side, each with the same window one token further on as its target."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class StandardLibraryText(LightningDataModule):
    """The ``.py`` files of the running Python's standard library, split by file into training and validation."""

    def __init__(self, context: int = 64, batch_size: int = 16, validation_every: int = 20) -> None:
        """Set up the data.

        Args:
            context: Tokens in a window.
            batch_size: Windows in a batch, on each rank.
            validation_every: Every n-th file is for validation.
        """
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.validation_every = validation_every

    def setup(self, stage: str) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        # Sorted, because all ranks must see the same files in the same order.
        files = [file for file in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS & set(file.parts)]
        validation = files[:: self.validation_every]
        training = sorted(set(files) - set(validation))
        self.training, self.validation = self._windows(training), self._windows(validation)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, self.batch_size, drop_last=True)

    def _windows(self, files: list[Path]) -> TextWindows:
        return TextWindows(encode("\n".join(file.read_text("utf-8") for file in files)), self.context)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.query_key_value(self.attention_norm(x))
        query, key, value = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(LightningModule):
    """A GPT over bytes whose output layer shares the weight of the token embedding."""

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        learning_rate: float = 4e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 30,
        vocabulary: int = VOCABULARY,
        loss: Literal["torch", "fused", "chunked"] = "torch",
    ) -> None:
        """Build the model.

        Args:
            context: Longest sequence, in tokens.
            width: Size of the hidden state.
            depth: Number of blocks.
            heads: Attention heads in a block.
            learning_rate: Peak learning rate of AdamW.
            weight_decay: Decay of matrices; vectors are not decayed.
            warmup_steps: Steps of linear warm-up, before the cosine decay to the end of training.
            vocabulary: Different tokens; the text here has those of VOCABULARY.
            loss: How cross-entropy is computed: by torch, over the buffer of the logits, or without ever having them whole.
        """
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
        self._initialise(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self._hidden(tokens))

    def _hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self._loss(batch)
        self.train_loss(loss)
        self.log("train_loss", self.train_loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self.val_loss(self._loss(batch))
        self.log("val_loss", self.val_loss, prog_bar=True)

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, temperature: float = 0.7) -> str:
        """Continue ``prompt`` by ``length`` tokens. Where parameters are sharded every rank must take part."""
        tokens = encode(prompt).long().unsqueeze(0).to(self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.hparams.context :])[:, -1]
            sampled = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
            tokens = torch.cat([tokens, sampled], dim=1)
        return decode(tokens[0])

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        if self.hparams.loss == "chunked":
            return fused_linear_cross_entropy(self._hidden(tokens), self.head.weight, targets)
        if self.hparams.loss == "fused":
            return fused_cross_entropy(self(tokens), targets, inplace=True)
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def _schedule(self, step: int) -> float:
        warmup = self.hparams.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.trainer.estimated_stepping_batches - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    def _initialise(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # The two layers that write to the residual stream: its variance then does not grow with depth.
                residual = name.endswith(("attention_out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Report(Callback):
    """Print loss and perplexity after each epoch, and at the end how far they fell and what the model writes."""

    def __init__(self, prompt: str = "def ", sample_length: int = 300) -> None:
        self.prompt = prompt
        self.sample_length = sample_length
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []

    def on_validation_end(self, trainer: Trainer, model: LightningModule) -> None:
        # The sanity check runs before the first step: its loss is where training starts from.
        if trainer.sanity_checking:
            self.val_losses.append(combined(trainer, "val_loss"))
            model.print(f"before training: validation {describe(self.val_losses[-1])}")

    def on_train_epoch_end(self, trainer: Trainer, model: LightningModule) -> None:
        if "val_loss" not in trainer.callback_metrics:
            return  # stopped within the epoch, by max_steps
        self.train_losses.append(combined(trainer, "train_loss_epoch"))
        self.val_losses.append(combined(trainer, "val_loss"))
        model.print(
            f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: "
            f"training {describe(self.train_losses[-1])}, validation {describe(self.val_losses[-1])}"
        )

    def on_train_end(self, trainer: Trainer, model: LightningModule) -> None:
        sample = model.generate(self.prompt, self.sample_length)
        for kind, losses in (("training", self.train_losses), ("validation", self.val_losses)):
            if losses:
                model.print(f"{kind}: from {describe(losses[0])} to {describe(losses[-1])}")
        model.print(f"\nA sample that starts with {self.prompt!r}:\n\n{sample}\n")


def combined(trainer: Trainer, name: str) -> float:
    # Reading a metric combines it over the ranks, so every rank must.
    return trainer.callback_metrics[name].item()


def describe(loss: float) -> str:
    return f"loss {loss:.3f}, perplexity {math.exp(loss):.1f}"


def main() -> None:
    # The text is in memory and a batch is a few slices of it: worker processes would only cost time.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    LightningCLI(GPT, StandardLibraryText, seed_everything_default=1)


if __name__ == "__main__":
    main()
