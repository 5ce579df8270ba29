"""Arguments of the library's functions, batches and meshes that are refused, with their words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bad_input import Words, missing, name_of, refused
from harness import RankPool
from models import make_batch, make_model
from tiny import Mixer, Tiny, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import paradyse


class Output(NamedTuple):
    loss: Tensor


class WithLoss(Tiny):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        return Output(super().forward(ids, labels))


class Marked(nn.Parameter):
    """A parameter of a class of its own, as quantization makes them."""


def quantized() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = Marked(model.weight.detach())
    return model


def profile(folder: Path, **changes: Any) -> None:
    given = {"model": Tiny(), "path": folder / "profile.jsonl", "lengths": [8], **changes}
    ids = tokens(1, 8)
    paradyse.profile(**{"make_batch": lambda batch, n: {"ids": ids, "labels": ids}, **given})


def verify(options: Any = None, batch: Any = None, model: Any = None) -> None:
    ids = tokens(1, 8)
    given = {"ids": ids, "labels": ids} if batch is None else batch
    paradyse.verify(WithLoss() if model is None else model, given, options)


class WithoutLoss(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(3, 3), backend="paradyse", options={"inner": "eager"})


MODULE = "give a torch.nn.Module, not"
WHOLE = "give a whole number of at least 1"


def mixed(**changes: Any) -> None:
    """An epoch of batches of mixed lengths, on one rank."""
    given = {"dataset": [{"input_ids": torch.arange(5)}], "tokens_per_step": 100, **changes}
    way = paradyse.Way(1, 0.0, 50, (50,), (1.0,))
    list(paradyse.MixedBatches(**{"ways": [way], **given}))


CALLS: dict[str, tuple[Callable[[Path], Any], Words]] = {
    # batches of mixed lengths
    "a stream of mixed lengths": (
        lambda f: mixed(dataset=iter([])),
        "give a dataset with a length of at least 1, not list_iterator",
    ),
    "a loader and tokens": (
        lambda f: mixed(dataset=torch.utils.data.DataLoader([{"input_ids": torch.arange(5)}])),
        "where it gives whole batches, leave tokens_per_step out",
    ),
    "neither a loader nor tokens": (
        lambda f: mixed(dataset=3, tokens_per_step=None),
        "give tokens_per_step, or a loader of batches, not int",
    ),
    "a dataset without tokens": (
        lambda f: mixed(tokens_per_step=None),
        "input_ids [5]: give [batch, tokens]",
    ),
    "a batch without sequences": (
        lambda f: mixed(dataset=[[]], tokens_per_step=None),
        "a batch without sequences",
    ),
    "no sequences": (lambda f: mixed(dataset=[]), "a length of at least 1"),
    "no tokens": (lambda f: mixed(tokens_per_step=0), "tokens_per_step=0: give at least 1"),
    "half a token": (lambda f: mixed(tokens_per_step=0.5), "give a whole number"),
    "no ways": (lambda f: mixed(ways=[]), "no way for groups of up to 1 ranks"),
    "no file of ways": (
        lambda f: mixed(ways=f / "ways.json"),
        "ways.json cannot be read",
    ),
    "a sequence too long": (
        lambda f: mixed(dataset=[{"input_ids": torch.arange(51)}]),
        "a sequence of 51 tokens fits no group",
    ),
    "an empty sequence": (
        lambda f: mixed(dataset=[{"input_ids": torch.arange(0)}]),
        "sequence 0 has input_ids [0]",
    ),
    "a batch of sequences": (
        lambda f: mixed(dataset=[{"input_ids": torch.zeros(2, 3)}]),
        "sequence 0 has input_ids [2, 3]",
    ),
    "nothing to learn": (
        lambda f: mixed(dataset=[{"input_ids": torch.arange(1)}]),
        "has no label that is a target",
    ),
    "a function to be trained": (lambda f: paradyse.MixedModel(len), MODULE),
    "a mesh for all groups": (
        lambda f: paradyse.MixedModel(nn.Linear(3, 3), {"mesh": None}),
        "option 'mesh': groups have meshes of their own",
    ),
    "groups to be explained as one": (
        lambda f: paradyse.explain(paradyse.MixedModel(nn.Linear(3, 3)), 1, 8),
        "groups have a plan each: MixedBatches.explain(step)",
    ),
    "room for one token": (
        lambda f: paradyse.measure_ways(
            paradyse.MixedModel(nn.Linear(3, 3)), [], tokens_per_rank=1
        ),
        "tokens_per_rank=1, repeats=3: give at least 2 and 1",
    ),
    "a way of no ranks": (
        lambda f: paradyse.Way(0, 0.0, 50, (50,), (1.0,)),
        "a group of 0 ranks",
    ),
    "a way of two times": (
        lambda f: paradyse.Way(1, 0.0, 50, (50,), (1.0, 2.0)),
        "2 times for 1 lengths",
    ),
    # profile
    "no lengths": (
        lambda f: profile(f, lengths=[]),
        "lengths []: give a list of at least one",
    ),
    "a length of 0": (
        lambda f: profile(f, lengths=[8, 0]),
        f"a length 0: {WHOLE}",
    ),
    "half a length": (
        lambda f: profile(f, lengths=[1.5]),
        f"a length 1.5: {WHOLE}",
    ),
    "a length as text": (
        lambda f: profile(f, lengths=["8"]),
        f"a length '8': {WHOLE}",
    ),
    "lengths as text": (lambda f: profile(f, lengths="128"), "lengths '128': give a list"),
    "a single length": (lambda f: profile(f, lengths=128), "lengths 128: give a list"),
    "a batch of 0": (lambda f: profile(f, batch=0), f"batch 0: {WHOLE}"),
    "a batch as text": (lambda f: profile(f, batch="2"), f"batch '2': {WHOLE}"),
    "a batch of True": (lambda f: profile(f, batch=True), f"batch True: {WHOLE}"),
    "no repeats": (lambda f: profile(f, repeats=0), f"repeats 0: {WHOLE}"),
    "half a repeat": (lambda f: profile(f, repeats=0.5), f"repeats 0.5: {WHOLE}"),
    "no strategies": (
        lambda f: profile(f, strategies=[]),
        "'strategies': the list is empty",
    ),
    "a misspelt strategy": (
        lambda f: profile(f, strategies=["ulysses"]),
        "unknown strategy 'ulysses' (did you mean 'ulysses_z'?)",
    ),
    "a limit in words": (lambda f: profile(f, memory_limit="lots"), "cannot read 'lots' as a size"),
    "a limit of 0": (lambda f: profile(f, memory_limit=0), "option 'memory_limit': cannot read 0"),
    "a plan to measure": (
        lambda f: profile(f, options={"plan": "metp"}),
        "options ['plan']: each strategy is measured as the plan; leave them out",
    ),
    "an unknown option": (lambda f: profile(f, options={"inners": 1}), "unknown option 'inners'"),
    "an unknown compiler": (
        lambda f: profile(f, options={"inner": "nvcc"}),
        "option 'inner': unknown value 'nvcc'",
    ),
    "no module to measure": (lambda f: profile(f, model="llama"), f"{MODULE} str"),
    "nothing to train": (lambda f: profile(f, model=nn.ReLU()), "ReLU has no parameters"),
    "no vocabulary": (
        lambda f: profile(f, make_batch=None),
        "Tiny does not tell its vocabulary: give make_batch, a function",
    ),
    "a folder to write to": (lambda f: profile(f, path=f), ("is a folder", "give a file")),
    "a device to write to": (
        lambda f: profile(f, path="/dev/null"),
        ("'/dev/null'", "no regular file"),
    ),
    "a folder that is not there": (
        lambda f: profile(f, path=f / "no" / "p.jsonl"),
        ("no/p.jsonl: no folder", "make it, or give another"),
    ),
    # explain, stats, verify
    "explain before a step": (
        lambda f: paradyse.explain(compiled(), 1, 8),
        "no graph of this model is known yet: run one step of the compiled model first",
    ),
    "explain what is no model": (lambda f: paradyse.explain(3, 1, 8), "give the compiled model"),
    "stats of what is no model": (lambda f: paradyse.stats("m"), "give the compiled model, not"),
    "verify without labels": (
        lambda f: verify(batch={"x": torch.ones(1, 3)}, model=WithoutLoss(3, 3)),
        "the model returned no loss; put labels into the batch",
    ),
    "verify a batch that is a list": (
        lambda f: verify(batch=[1, 2]),
        "give the keyword arguments of one call as a dict, not list",
    ),
    "verify a batch without tensors": (
        lambda f: verify(batch={"x": 3}),
        "the batch has no tensor; give the keyword arguments of one call",
    ),
    "verify nothing": (lambda f: verify(model=nn.ReLU()), "ReLU has no parameters"),
    "verify what is no model": (lambda f: verify(model=3), f"{MODULE} int"),
    "verify one plan": (
        lambda f: verify({"plan": "metp"}),
        "options ['plan']: every strategy is verified as the plan; leave it out",
    ),
    "verify with an unknown option": (lambda f: verify({"plans": 1}), "unknown option 'plans'"),
    # shard, full_state_dict, no_sync
    "shard what is no model": (lambda f: paradyse.shard(3), f"{MODULE} int"),
    "shard quantized weights": (
        lambda f: paradyse.shard(quantized()),
        "weight is a Marked, parallelized by something else",
    ),
    "add gradients up in whole numbers": (
        lambda f: paradyse.shard(nn.Linear(3, 3), reduce_dtype=torch.int32),
        ("reduce_dtype=torch.int32: give one of torch.float64, torch.float32", "or leave it out"),
    ),
    "add gradients up in a word": (
        lambda f: paradyse.shard(nn.Linear(3, 3), reduce_dtype="float32"),
        "reduce_dtype='float32': give one of",
    ),
    "shard over a number": (
        lambda f: paradyse.shard(nn.Linear(3, 3), 4),
        "mesh: give a torch DeviceMesh or None, not int 4",
    ),
    "the state of what is no model": (lambda f: paradyse.full_state_dict({}), f"{MODULE} dict"),
    "gradients of no model": (lambda f: paradyse.no_sync({}).__enter__(), f"{MODULE} dict"),
    # data
    "replicas of a shape": (
        lambda f: paradyse.replica_of((2, 2)),
        "mesh: give a torch DeviceMesh or None, not tuple (2, 2)",
    ),
    "samples of a stream": (
        lambda f: paradyse.replica_sampler(iter([1, 2])),
        ("a dataset with a length", "list_iterator", "paradyse.replica_of"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused(name: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    call, words = CALLS[name]
    with refused(tmp_path, words):
        call(tmp_path)


SIZES = [(0, 8), (1, 0), (-1, 8), (1, 2.5), ("1", 8), (1, None)]


@pytest.fixture(scope="module")
def ran() -> nn.Module:
    torch._dynamo.reset()
    model = torch.compile(Tiny(layers=1), backend="paradyse", options={"inner": "eager"})
    model(tokens(1, 8), tokens(1, 8)).backward()
    return model


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_that_are_none_are_not_explained(
    sizes: tuple[Any, Any], ran: nn.Module, tmp_path: Path
) -> None:
    with refused(tmp_path, WHOLE):
        paradyse.explain(ran, *sizes)


# Batches: those of no tokens are the backend's to refuse, the others fail as they do in eager mode.

Batch = Mapping[str, Tensor]
IDS = tokens(2, 7)
BATCHES: dict[str, tuple[Batch, Words]] = {
    "no sequences": (
        {"ids": tokens(0, 7), "labels": tokens(0, 7)},
        ("'ids' has shape [0, 7]", "batch and sequence must both be at least 1"),
    ),
    "no tokens": (
        {"ids": tokens(2, 0), "labels": tokens(2, 0)},
        ("'ids' has shape [2, 0]", "drop empty batches before calling the model"),
    ),
    "no labels of the tokens": (
        {"ids": IDS, "labels": tokens(0, 7)},
        "Expected input batch_size (14) to match target batch_size (0)",
    ),
    "fewer labels": (
        {"ids": IDS, "labels": tokens(2, 6)},
        "Expected input batch_size (14) to match target batch_size (12)",
    ),
    "a token beyond the vocabulary": ({"ids": IDS + 50, "labels": IDS}, "index out of range"),
    "a negative token": ({"ids": IDS - 50, "labels": IDS}, "index out of range"),
    "a label beyond the vocabulary": ({"ids": IDS, "labels": IDS + 50}, "out of bounds"),
    "tokens as fractions": ({"ids": IDS.double(), "labels": IDS}, "indices"),
    "a single row": ({"ids": IDS[0], "labels": IDS[0]}, "not enough values to unpack"),
    "a mask of another length": (
        {"ids": IDS, "labels": IDS, "mask": torch.ones(2, 1, 7, 9, dtype=torch.bool)},
        ("7", "9"),
    ),
    "a mask of whole numbers": (
        {"ids": IDS, "labels": IDS, "mask": torch.ones(2, 1, 7, 7, dtype=torch.int64)},
        "dtype",
    ),
}


def fails(batch: Batch, eager: bool = False) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Tiny(layers=1)
    if not eager:
        model = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    with pytest.raises(Exception) as caught:
        model(**batch).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_are_refused(name: str) -> None:
    batch, words = BATCHES[name]
    text = fails(batch)
    assert not missing(words, text), text
    assert "batch and sequence" in text or not missing(words, fails(batch, eager=True))


# Meshes


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def of_ranks(*ranks: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", list(ranks))


class Mesh:
    """Says what it is, and has nothing of it."""

    ndim = 1


MESHES: dict[str, tuple[Callable[[], Any], Words]] = {
    "three axes": (lambda: mesh_of(1, 1, 2), "mesh has 3 axes; give 1 (sequence) or 2 (data"),
    "four axes": (lambda: mesh_of(1, 1, 1, 2), "mesh has 4 axes; give 1 (sequence) or 2 (data"),
    "a part of the ranks": (lambda: of_ranks(0), "rank 1 is not part of the mesh"),
    "a number": (lambda: 2, "give a torch DeviceMesh or None, not int 2"),
    "a shape": (lambda: (1, 2), "give a torch DeviceMesh or None, not tuple (1, 2)"),
    "a name": (lambda: "sequence", "give a torch DeviceMesh or None, not str 'sequence'"),
    "its group": (
        lambda: torch.distributed.group.WORLD,
        "give a torch DeviceMesh or None, not Proc",
    ),
    "more ranks than there are": (lambda: mesh_of(4), ("world size 2", "4")),
    "something like a mesh": (Mesh, "give a torch DeviceMesh or None, not Mesh"),
}

USES: dict[str, Callable[[Any], Any]] = {
    "shard": lambda mesh: paradyse.shard(nn.Linear(3, 3), mesh),
    "replica_of": paradyse.replica_of,
    "the option": lambda mesh: torch.compile(
        nn.Linear(3, 3), backend="paradyse", options={"mesh": mesh, "inner": "eager"}
    )(torch.ones(2, 3)),
}


def texts_of_meshes() -> dict[tuple[str, str], str]:
    """What this rank is told of each mesh in each use; "" where it is taken."""
    found = {}
    for name, (make, _) in MESHES.items():
        for use, call in USES.items():
            try:
                call(make())
            except Exception as e:
                found[name, use] = str(e)
            else:
                found[name, use] = ""
    return found


@pytest.mark.slow
def test_meshes_that_are_refused(pool2: RankPool) -> None:
    texts = pool2.run(texts_of_meshes)[1]
    for (name, use), text in texts.items():
        assert not missing(MESHES[name][1], text), f"{name}, {use}: {text or 'taken'}"


PLANS: tuple[tuple[type[nn.Module], dict[str, Any], str], ...] = (
    (Tiny, {"plan": ["ulysses_z"]}, "1 names given, but the model has 2 layers"),
    (Tiny, {"plan": {"mlp": ["metp"] * 3}}, "3 names given, but the model has 2 mlp"),
    (Tiny, {"plan": lambda workload: 3}, "option 'plan': cannot read 3"),
    (Tiny, {"plan": lambda workload: "ulysses"}, "unknown strategy 'ulysses'"),
    (Tiny, {"memory_limit": 1}, "no plan fits"),
    (Mixer, {"on_unsupported": "error"}, "cannot split"),
)


def text_of_plan(number: int) -> str:
    """What this rank is told of one of ``PLANS``."""
    model, options, _ = PLANS[number]
    run = torch.compile(model(), backend="paradyse", options={"inner": "eager", **options})
    with pytest.raises(Exception) as caught:
        run(tokens(2, 7), tokens(2, 7))
    return str(caught.value)


@pytest.mark.broad(but="{'on_unsupported': 'error'}")
@pytest.mark.parametrize("number", range(len(PLANS)), ids=[name_of(p[1]) for p in PLANS])
def test_plans_that_do_not_fit_the_model(number: int, pool2: RankPool) -> None:
    for text in pool2.run(text_of_plan, number, timeout_s=20):
        assert PLANS[number][2] in text, text


def behind_an_exception(replicas: bool) -> str:
    """What is said of a right call behind one that the model has refused."""
    torch._dynamo.reset()
    model, batch = make_model("llama", num_hidden_layers=1), make_batch("plain", 2, 8)
    options: dict[str, Any] = {"inner": "eager"}
    if replicas:
        names = ("data", "sequence")
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
    else:
        paradyse.shard(model)
    run: Any = torch.compile(model, backend="paradyse", options=options)
    with pytest.raises(ValueError, match="You must specify exactly one of input_ids"):
        run()
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("ignore")  # of Dynamo, of what it meets on its way
        run(**batch).loss.backward()
    torch._dynamo.reset()
    run(**batch).loss.backward()
    return str(caught.value)


@pytest.mark.broad
@pytest.mark.parametrize("replicas", [False, True])
def test_behind_an_exception_of_the_model(replicas: bool, pool2: RankPool) -> None:
    """PyTorch traces what has raised one no more: the text of what comes of it says so."""
    for text in pool2.run(behind_an_exception, replicas, timeout_s=60):
        assert "once the model has raised an exception" in text and "_dynamo.reset()" in text


def test_a_mesh_without_a_process_group_is_refused(tmp_path: Path) -> None:
    with refused(tmp_path, "mesh was given but no process group exists; call torch.distributed"):
        paradyse.replica_of(type("DeviceMesh", (Mesh,), {"get_group": lambda self, dim: None})())
