"""Heads by tiles: every loss and gradient as with whole logits, which never exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from harness import RankPool
from models import FAMILIES, check, errors, make_batch, make_model, redraw, relative, run_step
from tiny import Tiny, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import paradyse
from paradyse.runtime.deferred import DeferredTensor
from paradyse.runtime.frame import Frame
from paradyse.runtime.frame_maker import frames_by
from paradyse.runtime.registry import captures_of
from paradyse.strategies import build_head, head, tiles
from paradyse.weights.sharded_tensor import ShardedTensor

Ranks = Callable[[int], RankPool]

VOCABULARY = 401
"""Words, that divide by no number of ranks."""


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """Of single tokens, averaged by hand."""
    losses, mask = cross_entropy(logits, labels, reduction="none"), labels.flatten() != -100
    return (losses * mask).sum() / mask.sum()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return -log_p.squeeze(-1).mean()


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) + 0.01 * logits.logsumexp(-1).square().mean()


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    classes = torch.arange(VOCABULARY, dtype=logits.dtype)
    targets = (labels[..., None] * classes).cos().softmax(-1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def forbidden(logits: Tensor, labels: Tensor) -> Tensor:
    """All words but the first ones have no chance."""
    late = torch.arange(VOCABULARY) >= 60
    return cross_entropy(logits.masked_fill(late, -math.inf), labels)


def weights(logits: Tensor) -> Tensor:
    return torch.arange(VOCABULARY, dtype=logits.dtype) / VOCABULARY + 0.5


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": cross_entropy,
    "sum": lambda y, t: cross_entropy(y, t.clamp(min=0), reduction="sum", ignore_index=3) / 17,
    "smoothing": lambda y, t: cross_entropy(y, t, label_smoothing=0.1),
    "weights": lambda y, t: cross_entropy(y, t, weight=weights(y)),
    "both": lambda y, t: cross_entropy(y, t, weight=weights(y), label_smoothing=0.2),
    "probabilities": probabilities,
    "softcap": lambda y, t: cross_entropy((y / 2).tanh() * 2, t),
    "shifted": lambda y, t: cross_entropy(y[:, :-1], t[:, 1:]),
    "single tokens": masked,
    "by hand": by_hand,
    "z-loss": z_loss,
    "forbidden words": forbidden,
}
AT_ONCE = LOSSES.keys() - {"single tokens", "by hand", "z-loss"}
"""Those that are one sum: gradients are computed with the forward."""


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Heads(Tiny):
    """A head for each of ``LOSSES`` that is named, on the same stream."""

    def __init__(self, *names: str) -> None:
        super().__init__(hidden=24, heads=2, layers=1)
        self.head = nn.Identity()
        self.names = names
        self.all = nn.ModuleList(
            nn.Linear(24, VOCABULARY, bias=i % 2 > 0) for i in range(len(LOSSES))
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        x = super().forward(ids)
        all_logits = [linear(x) for linear in self.all[: len(self.names)]]
        pairs = zip(self.names, all_logits, strict=True)
        losses = [LOSSES[name](logits, labels) for name, logits in pairs]
        return Output(torch.stack(losses).sum(), all_logits[0])


def heads(*names: str) -> Heads:
    torch.manual_seed(0)
    return redraw(Heads(*names)).double()


def labelled(batch: int, length: int) -> dict[str, Tensor]:
    ids = tokens(batch, length)
    return {"ids": ids, "labels": torch.where(ids % 5 == 1, -100, ids)}


def compiled_under(levers: str, model: Any, inner: str = "eager", **options: Any) -> Any:
    """``model``, its head with ``levers``."""
    plan = {"attention": "megatron_cz", "mlp": "megatron_ts", "head": levers}
    options = {"plan": plan, "inner": inner, **options}
    return torch.compile(model, backend="paradyse", options=options)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Inside, the tests' few tokens are several tiles."""
    few = {"TILE_TOKENS": 6, "MIN_TILE_TOKENS": 2}
    with patch.object(head, "TILE_TOKENS", 6), patch.multiple(tiles, **few):
        yield


def head_steps(compiled: Any, levers: str = "tiled") -> list[tuple[Any, Any]]:
    """The step of each head, and what has computed it under ``levers``."""
    programs = [g.program for c in captures_of(compiled) for g in c.graphs.values()]
    steps = [(p, s) for p in programs for s in p.steps if hasattr(s, "closed")]
    return [(s, p.variants[s.position][levers]) for p, s in steps]


def train_with(names: list[str], inner: str, sharded: bool, levers: str = "tiled") -> None:
    reference, model = heads(*names), heads(*names)
    if sharded:
        paradyse.shard(model)
    compiled = compiled_under(levers, model, inner)
    with small_tiles():
        for batch in (labelled(3, 13), labelled(1, 8)):
            want = run_step(reference, reference, batch, logits=True)
            check(run_step(compiled, model, batch, logits=True), want, torch.float64)
        found = head_steps(compiled, levers)[: len(names)]
        assert [variant.at_once for _, variant in found] == [n in AT_ONCE for n in names]
        assert [len(step.logits) for step, _ in found] == [1] + [0] * (len(names) - 1)


@pytest.mark.parametrize(
    ("nproc", "inner", "sharded"),
    [
        *(pytest.param(n, "eager", n != 3, marks=pytest.mark.slow) for n in (2, 3, 4)),
        pytest.param(1, "aot_eager", False, marks=pytest.mark.slow),
        pytest.param(2, "inductor", False, marks=pytest.mark.slow),
    ],
)
def test_every_loss_as_with_whole_logits(
    nproc: int, inner: str, sharded: bool, ranks: Ranks
) -> None:
    ranks(nproc).run(train_with, list(LOSSES), inner, sharded, timeout_s=300)


QUICK = ["both", "single tokens", "z-loss"]


@pytest.mark.broad
@pytest.mark.parametrize(("nproc", "sharded"), [(1, False), (2, True)])
def test_some_losses(nproc: int, sharded: bool, ranks: Ranks) -> None:
    ranks(nproc).run(train_with, QUICK, "eager", sharded, timeout_s=100)


WORDS = 97
"""Of the families' models."""

EXTRA = {
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "final_logit_softcapping": 2.0}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0}),
}


def make(family: str, dtype: torch.dtype = torch.float64) -> Any:
    if family in FAMILIES:
        model = make_model(family, dtype, num_hidden_layers=1, vocab_size=WORDS)
    else:
        import transformers

        name, config = EXTRA[family]
        cls = getattr(transformers, name)
        sizes = {**FAMILIES["llama"].config, "num_hidden_layers": 1, "use_cache": False}
        sizes["vocab_size"] = WORDS
        torch.manual_seed(0)
        model = redraw(cls(cls.config_class(**sizes, **config))).to(dtype)
    model.loss_function = in_its_own_precision
    return model


def in_its_own_precision(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """HuggingFace's loss without its cast to float32."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    how = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def train_family(family: str, sharded: bool, levers: str = "tiled") -> None:
    reference, model = make(family), make(family)
    if sharded:
        paradyse.shard(model)
    compiled = compiled_under(levers, model)
    batch: dict[str, Any] = make_batch("plain", 3, 13)
    if FAMILIES.get(family, FAMILIES["llama"]).causal:
        batch["num_items_in_batch"] = torch.tensor(11)
    # Gemma computes norms and attention in float32, whatever the model's dtype.
    dtype, error = (torch.float32, 1e-6) if family == "gemma2" else (torch.float64, 1e-9)
    with small_tiles():
        want = run_step(reference, reference, batch, logits=True)
        check(run_step(compiled, model, batch, logits=True), want, dtype, family)
        ((step, variant),) = head_steps(compiled, levers)
        assert variant.at_once and len(step.logits) == 1
        with torch.no_grad():
            loss = compiled(**batch).loss
        assert relative(loss, reference(**batch).loss.detach()) < error
        for p in (*model.parameters(), *reference.parameters()):
            p.requires_grad_(p.shape[0] != reference.config.vocab_size)
        want = run_step(reference, reference, batch)
        check(run_step(compiled, model, batch), want, dtype, f"{family}, head frozen")


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc", "sharded"),
    [
        ("gpt2", 1, False),
        *(
            pytest.param(f, n, n > 1, marks=pytest.mark.slow)
            for f in ("llama", "gpt2", "gemma2", "granite", "bert", "opt")
            for n in (1, 2, 3)
        ),
    ],
)
def test_families(family: str, nproc: int, sharded: bool, ranks: Ranks) -> None:
    ranks(nproc).run(train_family, family, sharded, timeout_s=300)


class Sizes(TorchDispatchMode):
    """Notes the largest number of elements that an operator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and not isinstance(x, DeferredTensor | ShardedTensor):
                self.largest = max(self.largest, x.numel())
        return out


def largest_value(levers: str, names: list[str]) -> tuple[int, int]:
    """Elements of the largest value of a training step, and those of a rank's logits."""
    model, batch = heads(*names), labelled(10, 50)
    options = {"plan": {"head": levers}, "inner": "eager"}
    compiled, sizes = torch.compile(model, backend="paradyse", options=options), Sizes()

    class Watched(Frame):
        """Outside of it, such a mode keeps Dynamo from running what is compiled."""

        def run(self) -> Any:
            with sizes:
                return super().run()

    with patch.object(head, "TILE_TOKENS", 100):
        run_step(compiled, model, batch)  # it compiles
        with frames_by(Watched):
            loss = compiled(**batch).loss
        with sizes:
            loss.backward()
    assert sizes.largest > 0
    ranks = torch.distributed.get_world_size()
    return sizes.largest, batch["ids"].numel() * VOCABULARY // ranks


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", [["mean"], ["z-loss"]], ids="-".join)
def test_no_value_has_all_tokens_and_the_vocabulary(
    names: list[str], nproc: int, ranks: Ranks
) -> None:
    for largest, logits in ranks(nproc).run(largest_value, "tiled", names, timeout_s=100):
        assert largest < logits
    for largest, logits in ranks(nproc).run(largest_value, "", names, timeout_s=100):
        assert largest >= logits, "the test sees logits"


def train_twice() -> None:
    for names in (["mean"], ["z-loss"]):
        reference, model = heads(*names), heads(*names)
        batch = labelled(2, 9)
        grads = []
        with small_tiles():
            for call in (reference, compiled_under("tiled", model)):
                loss = call(**batch).loss
                parameters = list((reference, model)[len(grads)].parameters())
                for keep in (True, False):
                    found = torch.autograd.grad(
                        3 * loss, parameters, retain_graph=keep, allow_unused=True
                    )
                grads.append(found)
        for want, got in zip(*grads, strict=True):
            assert (want is None) == (got is None)
            assert want is None or relative(got, want) < 1e-9


def test_backward_may_come_twice(pool1: RankPool) -> None:
    pool1.run(train_twice, timeout_s=100)


def under_autocast(levers: str) -> dict[str, float]:
    """Errors of bfloat16 against float32: of eager, and under ``levers``."""
    reference, batch = make("llama", torch.float32), make_batch("plain", 2, 11)
    exact = run_step(reference, reference, batch)
    found = {}
    for name in ("eager", levers):
        model = make("llama", torch.float32)
        call = model if name == "eager" else compiled_under(levers, model)

        def cast(call: Any = call, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(**kwargs)

        with small_tiles():
            found[name] = max(errors(run_step(cast, model, batch), exact).values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_under_autocast(nproc: int, ranks: Ranks) -> None:
    for found in ranks(nproc).run(under_autocast, "tiled", timeout_s=100):
        assert found["tiled"] < 2 * found["eager"]


def train_replicas(levers: str) -> None:
    """On two replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (2, torch.distributed.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    names = ["mean", "weights"]
    reference, model = heads(*names), heads(*names)
    paradyse.shard(model, mesh)
    compiled = compiled_under(levers, model, mesh=mesh)
    batches = [labelled(2, 9), labelled(2, 12)]
    batches[0]["labels"][0, 1:] = -100
    joined: Mapping[str, Tensor] = {
        key: torch.cat([F.pad(b[key], (0, 12 - b[key].shape[1]), value=fill) for b in batches])
        for key, fill in (("ids", 0), ("labels", -100))
    }
    want = run_step(reference, reference, joined)
    with small_tiles():
        got = run_step(compiled, model, batches[mesh.get_local_rank("data")])
    check(got, want, torch.float64)


def test_replicas_weigh_by_their_tokens(pool2: RankPool) -> None:
    pool2.run(train_replicas, "tiled", timeout_s=100)


def test_unknown_levers_are_refused() -> None:
    with pytest.raises(ValueError, match="no levers 'offload'; give one of 'tiled', 'vocabulary'"):
        build_head(None, None, None, "offload")  # type: ignore[arg-type]
