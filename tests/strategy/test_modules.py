"""Modules and parameters of unusual form: every stage trains them as DDP does, bit for bit at two ranks.

Each case is one ordinary LightningModule; all of them are trained under DDP and under each stage in the same ranks.
"""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, rnn
from torch.utils.checkpoint import checkpoint

from tests.harness import run
from tests.parity import STAGES, Outcome, all_stages, assert_same, trained

WIDTH = 6
TOKENS = 10

CASES: list[type["Case"]] = []


def case(cls: type["Case"]) -> type["Case"]:
    """Train this module at two ranks and all stages."""
    CASES.append(cls)
    return cls


class Case(pl.LightningModule):
    """Trains ``forward`` towards ones; a case overrides what is unusual about it."""

    width = WIDTH
    exact = True
    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        """Make the layers."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(y := self(batch), torch.ones_like(y))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Plain SGD would hide a lost momentum, Adam a wrong gradient scale.
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


def tokens(batch: Tensor) -> Tensor:
    return (batch.abs() * 7).long() % TOKENS


# -- the same weight in several places -------------------------------------------------------------------------------


@case
class Tied(Case):
    """Weights and a bias tied across submodules, at different depths, and one layer under two names."""

    width = 5

    def build(self) -> None:
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.decoder = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, TOKENS)})
        self.decoder["b"].weight = self.embedding.weight
        self.decoder["a"].weight = self.encoder[1][0].weight
        self.encoder[0].bias = self.decoder["a"].bias
        self.alias = self.encoder[0]

    def forward(self, batch: Tensor) -> Tensor:
        x = self.alias(self.encoder(self.embedding(tokens(batch))))
        return self.decoder["b"](self.decoder["a"](x)) + self.encoder[0](x).mean()

    def still_tied(self) -> bool:
        return (
            self.decoder["b"].weight is self.embedding.weight
            and self.decoder["a"].weight is self.encoder[1][0].weight
            and self.encoder[0].bias is self.decoder["a"].bias
            and self.alias is self.encoder[0]
        )

    def on_train_batch_start(self, *args: Any) -> None:
        self.extra["tied at start"] = self.still_tied()

    def on_train_end(self) -> None:
        self.extra["tied at end"] = self.still_tied()
        self.extra["keys"] = list(self.state_dict())


class Reader(nn.Module):
    """Reads the weights of a layer that belongs to somebody else, in every way."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other = [other]
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.other[0].weight, self.other[0].bias
        # A placeholder of another shape would broadcast in the first of these without an error.
        x = self.own(x) + bias + x * weight[0] + x * weight.T.mean(1)
        x = x @ weight + torch.cat([weight[:, :1].T, bias[None]]).sum(0)
        x = torch.einsum("bi,ji->bj", x, weight) + sum(row.mean() for row in weight)
        return torch.addmm(bias, x, weight.t()) + float(weight.detach().numpy().std())


@case
class SiblingWeight(Case):
    def build(self) -> None:
        self.base = nn.Linear(WIDTH, WIDTH)
        self.reader = Reader(self.base)
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.reader(x)) + F.linear(x, self.net.weight * 2, self.net.bias)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight.sum(0), (grad * x).sum(0).expand_as(weight)


@case
class OwnFunction(Case):
    """A sibling's weight goes to a user's autograd function, which no ``__torch_function__`` sees."""

    def build(self) -> None:
        self.base = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(self.net(x), self.base.weight) + Scale.apply(self.base(x), self.net.weight)


# -- uses that no forward hook brackets ------------------------------------------------------------------------------


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.3))

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() + self.shift

    def decode(self, z: Tensor) -> Tensor:
        return self.outer.forward(z - self.shift)


class NoCall(nn.Linear):
    """Calls nothing that has hooks."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 2


class Inner(Case):
    """A LightningModule inside another one."""

    def build(self) -> None:
        self.codec = Codec()
        self.layer = NoCall(WIDTH, WIDTH)


@case
class OtherMethods(Case):
    def build(self) -> None:
        self.codec = Codec()
        self.inner = Inner()

    def loss(self, batch: Tensor) -> Tensor:
        z = self.codec.encode(self.inner.layer(batch) + self.inner.codec.decode(batch))
        x = self.codec.decode(z) + F.linear(z, self.codec.outer.weight)
        return F.mse_loss(x, batch) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


class Delegate(nn.Module):
    """Hands on every attribute that it does not have, as adapters and compilers' wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(x, self.weight)


@case
class Delegating(Case):
    def build(self) -> None:
        self.net = nn.Sequential(Delegate(Delegate(nn.Linear(WIDTH, WIDTH))), Delegate(nn.Linear(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@case
class BareParameters(Case):
    """At the root, in lists and in dictionaries, nested; one of no dimension; one that is not a leaf's child."""

    def build(self) -> None:
        self.root = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.listed = nn.ParameterList([nn.Parameter(torch.full((WIDTH, WIDTH), 0.1 * i)) for i in range(3)])
        self.named = nn.ParameterDict({"w": torch.eye(WIDTH), "b": torch.zeros(WIDTH)})
        self.deep = nn.ModuleList([nn.ParameterList([torch.ones(WIDTH)]), nn.ParameterDict({"x": torch.ones(1)})])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x + (x @ weight).tanh()
        x = F.linear(x, self.named["w"], self.named["b"]) * self.root / self.temperature
        return x * self.deep[0][0] + self.deep[1]["x"]


@case
class FunctionalCall(Case):
    """Weights of a hypernetwork, and the module's own, given to a stateless call."""

    def build(self) -> None:
        self.net = nn.Linear(WIDTH, WIDTH)
        self.hyper = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.net.named_parameters())
        made = {"weight": self.hyper.weight * 0.5, "bias": self.hyper(x).mean(0)}
        return torch.func.functional_call(self.net, own, (x,)) + torch.func.functional_call(self.net, made, (x,))


@case
class GradientOfGradient(Case):
    """A gradient penalty and an inner update by hand (MAML), through ``autograd.grad``."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Tensor) -> Tensor:
        if not self.training:
            return self(batch).mean()
        x = batch.detach().requires_grad_()
        (penalty,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        names, values = zip(*self.net.named_parameters())
        inner = torch.autograd.grad(self(batch).pow(2).mean(), values, create_graph=True)
        updated = {name: v - 0.1 * g for name, v, g in zip(names, values, inner)}
        return torch.func.functional_call(self.net, updated, (batch,)).pow(2).mean() + penalty.norm()


@case
class Transforms(Case):
    """Forward-mode derivatives and an ensemble under ``torch.func``."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out, slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        weights, _ = torch.func.stack_module_state(list(self.members))  # type: ignore[arg-type]
        return torch.vmap(_member, in_dims=(0, None))(weights, out).sum(0) + slope + torch.vmap(self.net)(x)


def _member(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(x, weights["weight"], weights["bias"])


# -- layers that read their children's or cached weights -------------------------------------------------------------


@case
class Transformer(Case):
    """With a padding mask, so that the fused path of evaluation shows: it zeroes what is padded."""

    width = 5

    def build(self) -> None:
        self.embedding = nn.Embedding(TOKENS, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True, batch_first=True)

    def forward(self, batch: Tensor) -> Tensor:
        ids = tokens(batch)
        ids[:, 0] = 1
        ids[:, -1] = 0
        mask = ids == 0
        y = self.encoder(self.embedding(ids), src_key_padding_mask=mask)
        z = self.attention(y, y[..., :4], y[..., 4:], key_padding_mask=mask, need_weights=False)[0]
        return self.decoder(y, z)


@case
class Recurrent(Case):
    """LSTM, GRU and RNN in both directions, with projection, packed, tied to each other; cells."""

    width = 5

    def build(self) -> None:
        self.lstm = nn.LSTM(1, 4, num_layers=2, bidirectional=True, proj_size=2, batch_first=True)
        self.gru = nn.GRU(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.rnn = nn.RNN(6, 6, batch_first=True)
        self.tied = nn.RNN(6, 6, batch_first=True)
        self.tied.weight_hh_l0 = self.rnn.weight_hh_l0
        self.cell = nn.LSTMCell(6, 6)

    def forward(self, batch: Tensor) -> Tensor:
        x, _ = self.lstm(batch[..., None])
        packed = rnn.pack_padded_sequence(x, [x.shape[1]] + [3] * (len(x) - 1), batch_first=True)
        x, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        x = self.tied(self.rnn(x)[0])[0]
        return self.cell(x[:, -1])[0] + x.mean(1)


@case
class Normalised(Case):
    """Weight and spectral norm, old and new, an orthogonal and a home-made parametrization, a pruned layer."""

    def build(self) -> None:
        self.old_weight_norm = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.new_weight_norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old_spectral_norm = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.new_spectral_norm = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.home_made = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.home_made, "weight", Symmetric())
        self.pruned = prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.5)
        self.cell = nn.utils.weight_norm(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self.children())[:-1]:
            x = x + layer(x).tanh()
        with parametrize.cached():
            x = x + self.home_made(x) + self.home_made.weight.mean()
        return self.cell(x[:, None])[0]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@case
class Embeddings(Case):
    """Padding index, ``max_norm`` (which edits the weight in forward), sparse gradients, bags."""

    width = 5
    exact = False  # sparse sums have another order
    sparse_gradients = True

    def build(self) -> None:
        self.padded = nn.Embedding(TOKENS, WIDTH, padding_idx=3)
        self.bounded = nn.Embedding(TOKENS, WIDTH, max_norm=0.5)
        self.sparse = nn.Embedding(TOKENS, WIDTH, sparse=self.sparse_gradients)
        self.bag = nn.EmbeddingBag(TOKENS, WIDTH, mode="mean", sparse=self.sparse_gradients)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        ids = tokens(batch)
        # All rows on all ranks: what DDP's ranks renormalise would otherwise differ, and its weights with it.
        everything = self.bounded(torch.arange(TOKENS)).mean()
        return self.head(self.padded(ids) + self.bounded(ids) + self.sparse(ids)) + self.bag(ids)[:, None] + everything


class DenseEmbeddings(Embeddings):
    sparse_gradients = False


@case
class Images(Case):
    """Weights in channels-last order, transposed convolutions, batch and group norm."""

    width = 8

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, (2, 3), groups=2),
            nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 3, 2, bias=False), nn.InstanceNorm2d(3, affine=True),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, batch: Tensor) -> Tensor:
        x = batch.reshape(-1, 1, 2, 4).to(memory_format=torch.channels_last)
        return self.net(x)

    def on_train_batch_start(self, *args: Any) -> None:
        weight = self.net[3].weight
        formats = (torch.contiguous_format, torch.channels_last)
        self.extra["stride"] = [
            weight.stride(),
            weight.stride(0),
            *(weight.is_contiguous(memory_format=f) for f in formats),
        ]


class Residual(nn.Module):
    """The block of a ResNet, with a shortcut where the shape changes."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


@case
class ResidualNet(Case):
    """A small ResNet: in-place activations, strided shortcuts, pooling, weights started at zero."""

    width = 64

    def build(self) -> None:
        stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.features = nn.Sequential(stem, nn.MaxPool2d(2), Residual(4, 4, 1), Residual(4, 8, 2))
        self.classifier = nn.Linear(8, 3)
        for module in self.modules():
            if isinstance(module, Residual):
                nn.init.zeros_(module.body[-1].weight)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.features(batch.reshape(-1, 1, 8, 8))
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))

    def on_train_epoch_end(self) -> None:
        self.extra["statistics"] = [m.running_var.tolist() for m in self.modules() if isinstance(m, nn.BatchNorm2d)]


@case
class RoutedExperts(Case):
    """A mixture of experts with a learned router: each token goes to its best expert, and rank 1 never needs the last."""

    def build(self) -> None:
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(4)
        )

    def forward(self, batch: Tensor) -> Tensor:
        x = self.inlet(batch)
        scores = self.router(x).softmax(-1)
        if self.global_rank == 1:
            scores = scores * torch.tensor([1.0, 1.0, 1.0, 0.0])
        gate, choice = scores.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == i)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gate[rows, None])
        self.extra.setdefault("used", []).append(sorted(set(choice.tolist())))
        return x + out


@case
class RunningStatistics(Case):
    """Buffers follow DDP's rule step by step: rank 0's count."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.extra["history"] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += self.global_rank + 1
            self.hidden += x[0, :3]
        return self.net(x) + self.hidden.sum()

    def on_train_batch_end(self, *args: Any) -> None:
        values = [self.net[1].running_mean, self.net[1].running_var, self.seen, self.hidden]
        self.extra["history"].append([v.tolist() for v in values])


@case
class Metrics(Case):
    """A sum near 70,000 is exact (16-bit states would round it) and synced over the ranks."""

    def build(self) -> None:
        self.net = nn.Linear(WIDTH, WIDTH)
        self.total = torchmetrics.SumMetric()
        self.scores = nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total(torch.tensor(11667.0 + batch_idx))
        self.scores["mean"](self.loss(batch), weight=len(batch))
        self.scores["all"](batch[:, 0])
        self.log("total", self.total)
        self.log("mean", self.scores["mean"])

    def on_validation_epoch_end(self) -> None:
        self.extra["total"] = (float(self.total.compute()), self.total.sum_value.dtype)
        self.extra["all"] = self.scores["all"].compute().tolist()


# -- unusual tensors -------------------------------------------------------------------------------------------------


@case
class TinyAndEmpty(Case):
    def build(self) -> None:
        self.one = nn.Linear(WIDTH, 1)
        with pytest.warns(UserWarning, match="zero-element"):
            self.none, self.flat = nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.scalar_frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.single = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) + self.none(x).sum() + self.flat(self.none(x)) + self.empty.sum()
        return y * self.scalar * self.scalar_frozen + self.single[0]

    def on_train_batch_start(self, *args: Any) -> None:
        self.extra["shapes"] = [tuple(p.shape) for p in self.parameters()]


@case
class MixedTypes(Case):
    """fp32, fp64 and complex weights trained and clipped together; integer, boolean and half tables frozen."""

    exact = False  # the norm is summed in another order
    settings = {"gradient_clip_val": 0.1}

    def build(self) -> None:
        self.single = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)
        self.halves = nn.Parameter(torch.ones(WIDTH, dtype=torch.half), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.single(x).double()).float()[:, self.table] * self.mask * self.halves.float()
        return torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=WIDTH)


class Marked(nn.Parameter):
    """A user's own kind of parameter."""


@case
class UnusualTensors(Case):
    """Weights stored transposed, expanded, as a slice of a larger tensor; of a user's class; with attributes."""

    def build(self) -> None:
        self.transposed = nn.Parameter(torch.randn(4, WIDTH).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.sliced = nn.Parameter(torch.randn(4, 8)[:, 1:5])
        self.marked = Marked(torch.randn(4))
        self.marked.decay = 0.25  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed @ self.sliced + self.permuted.sum((1, 2)) + self.marked * self.marked.decay

    def on_train_batch_start(self, *args: Any) -> None:
        self.extra["marked"] = isinstance(self.marked, Marked), self.marked.decay, isinstance(self.marked, nn.Parameter)
        self.extra["strides"] = [p.stride() for p in (self.transposed, self.permuted)]

    def on_train_end(self) -> None:
        self.extra["mark kept"] = self.marked.decay


# -- freezing --------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen layer with a trainable adapter inside."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@case
class Adapters(Case):
    def build(self) -> None:
        self.net = nn.Sequential(LowRank(), nn.ReLU(), LowRank(), nn.LayerNorm(WIDTH))
        self.net[3].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class FrozenRecompute(Case):
    """Frozen norms between trainable layers, recomputed in backward."""

    use_reentrant = False

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in range(3)
        )
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).requires_grad_(False)
        self.bare = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, self.frozen]:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return checkpoint(lambda x: F.linear(x, self.bare).tanh(), x, use_reentrant=self.use_reentrant)


@case
class FrozenReentrant(FrozenRecompute):
    use_reentrant = True


CASES.append(FrozenRecompute)


class InsideAndOutside(Case):
    """Weights used inside and outside a recompute: if it is reentrant their gradients come twice, and before others."""

    use_reentrant = False
    settings = {"accumulate_grad_batches": 2}
    exact = False  # the two halves of a gradient are added in another order

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.between, self.first(x), use_reentrant=self.use_reentrant)
        return F.linear(F.linear(x, self.between[0].weight), self.between[0].weight, self.between[0].bias)


@case
class InsideAndOutsideReentrant(InsideAndOutside):
    use_reentrant = True


@case
class Teacher(Case):
    """A frozen copy run without gradients, in another mode, beside the student."""

    def build(self) -> None:
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
            with torch.inference_mode():
                noise = self.student[2](x).clone()
        return self.student(x) - wanted - noise.clone() + self.teacher(self.student(x))


# -- late building ---------------------------------------------------------------------------------------------------


@case
class BuiltLate(Case):
    """Layers made in ``configure_model``, among them a lazy one."""

    def build(self) -> None:
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, WIDTH))
            self.net(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# -- several optimizers ----------------------------------------------------------------------------------------------


@case
class Gan(Case):
    """Two optimizers by hand: toggling, weight clipping as of the Wasserstein GAN, a penalty, accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator, critic = self.optimizers()
        self.toggle_optimizer(critic)
        fake = self.generator(batch)
        mixed = (0.5 * (fake + batch)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        loss = self.critic(fake.detach()).mean() - self.critic(batch).mean() + slope.pow(2).mean()
        self.manual_backward(loss)
        critic.step()
        critic.zero_grad()
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        self.untoggle_optimizer(critic)
        self.log("critic", loss)

        self.toggle_optimizer(generator)
        self.manual_backward(-self(batch).mean())
        if batch_idx % 2:
            self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="value")
            generator.step()
            generator.zero_grad()
        self.untoggle_optimizer(generator)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), eps=1e-3),
            torch.optim.RMSprop(self.critic.parameters(), lr=5e-2),
        ]


@case
class LayerwiseRates(Case):
    """A rate and a decay for each group, of unequal classes, under a schedule for each."""

    def build(self) -> None:
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [layer.weight], "lr": 0.02 / (i + 1), "weight_decay": 0.1} for i, layer in enumerate(self.net)
        ]
        groups.append({"params": (layer.bias for layer in self.net), "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [partial(_decayed, rate) for rate in (0.9, 0.8, 0.7, 0.6, 0.5)]
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _decayed(rate: float, step: int) -> float:
    return rate**step


# DDP refuses reentrant recompute of frozen blocks, and does not average sparse gradients as it does dense ones. Without,
# the numbers are the same.
REFERENCES = {
    FrozenReentrant: FrozenRecompute,
    InsideAndOutsideReentrant: InsideAndOutside,
    Embeddings: DenseEmbeddings,
}


def settings(module: type[Case]) -> dict[str, Any]:
    return {"data": (16, module.width), "num_sanity_val_steps": 1, **module.settings}


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__)
def test_trains_like_ddp(module: type[Case]) -> None:
    results = run(2, all_stages, module, settings(module), REFERENCES.get(module, module))
    assert len(results[0]) == 1 + len(STAGES)
    assert_same_everywhere(results, module)


def assert_same_everywhere(results: list[dict[int, Outcome]], module: type[Case]) -> None:
    assert_same(results, None if module.exact else False)
    for by_stage in results:
        for got in by_stage.values():
            assert got.extra == by_stage[0].extra


# One unit for every module that has parameters of its own, and more ranks than some of them have elements.
FINEST = {"unit_policy": lambda module, recurse, nonwrapped_numel: True, "prefetch": 2}
UNEVEN = [Tied, SiblingWeight, Transformer, Recurrent, TinyAndEmpty, UnusualTensors, Adapters]


def stage_3(modules: list[type[Case]], strategy_kwargs: dict[str, Any]) -> list[dict[int, Outcome]]:
    return [
        {
            0: trained(REFERENCES.get(module, module), 0, **settings(module)),
            3: trained(module, 3, strategy_kwargs=strategy_kwargs, **settings(module)),
        }
        for module in modules
    ]


def finest_units() -> list[dict[int, Outcome]]:
    return stage_3(UNEVEN, FINEST)


def test_three_ranks_and_the_finest_units() -> None:
    for module, *results in zip(UNEVEN, *run(3, finest_units), strict=True):
        # Statistics of three ranks are sums whose order is the backend's.
        assert_same(results)
        assert all(r[3].extra.keys() == r[0].extra.keys() for r in results), module


def test_one_rank_that_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_ALWAYS_RELEASE", "1")
    [results] = run(1, stage_3, CASES, {})
    for module, result in zip(CASES, results, strict=True):
        assert_same_everywhere([result], module)
