"""Checkpoints on disk straight into shards: exact, by rows, and refused before anything changes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool, run_ranks
from models import FAMILIES, check, make_batch, make_model, redraw, run_step
from torch import Tensor, nn

BIG = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 12_000}
"""Sizes of a Llama of 130 MB: as much as tells weights from noise in a process's memory."""


def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``saved(family, "one" | "several")``: the folder of ``make_model(family)``."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, files: str = "one") -> Path:
        if (family, files) not in made:
            path = made[family, files] = tmp_path_factory.mktemp(f"{family}_{files}")
            size = "60KB" if files == "several" else "5GB"
            make_model(family).save_pretrained(path, max_shard_size=size)
            assert (len(list(path.glob("*.safetensors"))) > 2) == (files == "several")
        return made[family, files]

    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return checkpoints(tmp_path_factory)


def on_meta(family: str, **config: Any) -> Any:
    import transformers

    spec = FAMILIES[family]
    cls = getattr(transformers, spec.cls)
    defaults: dict[str, Any] = {"use_cache": False} if spec.causal else {}
    with torch.device("meta"):
        return cls(cls.config_class(**{**spec.config, **defaults, **config}))


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def held(x: Tensor) -> Tensor:
    return getattr(x, "local", x)


def state(model: nn.Module) -> dict[str, Any]:
    """What must be as before after a refusal: objects, devices, values."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {n: (id(x), held(x).device, x.requires_grad, _sum(held(x))) for n, x in tensors}


def _sum(x: Tensor) -> float | None:
    return None if x.is_meta else x.double().sum().item()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and torch.equal(got[name], x), name


# On several ranks


def load_and_train(family: str, folder: str) -> tuple[int, int, int]:
    """Bytes read, bytes of this rank's rows, bytes of the model."""
    import paradyse

    reference = make_model(family)
    model = paradyse.shard(on_meta(family))
    assert all(held(p).is_meta for p in model.parameters())
    first = next(model.parameters())
    first.requires_grad_(False)
    first.mark = "kept"
    objects = [id(p) for p in model.parameters()]
    report = paradyse.load_safetensors(model, folder)
    assert objects == [id(p) for p in model.parameters()]
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * (len(objects) - 1)
    assert first.mark == "kept" and not held(first).is_meta and first.device.type == "cpu"
    assert (report.num_tensors, report.skipped, report.kept) == (len(objects), (), ())
    assert_same(paradyse.full_state_dict(model), reference.state_dict())
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    if family == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight
    sizes = [
        sum(held(p).numel() * p.element_size() for p in m.parameters()) for m in (model, reference)
    ]
    first.requires_grad_(True)
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 2, 11)
    check(run_step(compiled, model, batch), run_step(reference, reference, batch), what=family)
    return report.bytes_read, sizes[0], sizes[1]


@pytest.mark.broad
@pytest.mark.parametrize(
    ("family", "nproc", "files"),
    [
        ("gpt2", 2, "several"),
        ("llama_odd", 3, "one"),
        pytest.param("llama", 2, "one", marks=pytest.mark.slow),
        pytest.param("llama_odd", 2, "several", marks=pytest.mark.slow),
        pytest.param("gpt2", 4, "several", marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_its_rows(
    family: str, nproc: int, files: str, saved: Any, ranks: Callable[[int], RankPool]
) -> None:
    """Weights to the bit, then a step of training; the ranks together read each value once."""
    args = (family, str(saved(family, files)))
    results = ranks(nproc).run(load_and_train, *args, timeout_s=200)
    total = results[0][2]
    for read, rows, _ in results:
        assert read == rows
        assert read <= total / nproc * 1.06  # where rows do not divide, one more of each tensor
    assert sum(read for read, _, _ in results) == total


def overwrite(folder: str) -> None:
    """Shards that have values, in layouts of every kind."""
    import torch.distributed as dist

    import paradyse
    from paradyse.weights.layout import ShardLayout, even_layout
    from paradyse.weights.sharded_tensor import relayout

    model = paradyse.shard(redraw(make_model("llama", torch.float64), seed=1))
    weights = [p for p in model.parameters() if p.ndim == 2]
    axis = weights[0].placement.axis
    layouts = [
        even_layout(axis, weights[0].shape[1], dim=1),
        ShardLayout(axis, 0, (((32, 8), (0, 4)), ((4, 28), (40, 24)))),
        ShardLayout(axis, 1, (((5, 1), (0, 5)), ((6, 58),))),
        ShardLayout(axis, 0, ((), ((0, 32),))),
    ]
    for p, layout in zip(weights, layouts):
        relayout(p, layout)
    places = [(p.local.data_ptr(), p.placement) for p in model.parameters()]
    report = paradyse.load_safetensors(model, folder)
    assert places == [(p.local.data_ptr(), p.placement) for p in model.parameters()]
    assert report.bytes_read == sum(4 * p.local.numel() for p in model.parameters())
    want = make_model("llama").double().state_dict()
    assert_same(paradyse.full_state_dict(model), want)
    dist.barrier()


def test_any_layout_is_overwritten_in_place(saved: Any, pool2: RankPool) -> None:
    """Columns, several stretches in any order, no rows at all; float32 on disk, float64 here."""
    pool2.run(overwrite, str(saved("llama", "several")), timeout_s=100)


def load_few_rows(folder: str) -> int:
    import paradyse

    with torch.device("meta"):
        model = paradyse.shard(nn.Linear(5, 3, dtype=torch.bfloat16))
    read = paradyse.load_safetensors(model, Path(folder) / "few.safetensors").bytes_read
    full = paradyse.full_state_dict(model)
    assert torch.equal(full["weight"], torch.arange(15.0).view(3, 5).bfloat16())
    assert torch.equal(full["bias"], torch.arange(3.0).bfloat16())
    return read


def test_fewer_rows_than_ranks(tmp_path: Path, pool4: RankPool) -> None:
    from safetensors.torch import save_file

    tensors = {"weight": torch.arange(15.0).view(3, 5), "bias": torch.arange(3.0)}
    save_file(tensors, tmp_path / "few.safetensors")
    assert pool4.run(load_few_rows, str(tmp_path), timeout_s=60) == [0, 24, 24, 24]


def refuse(folder: str, other: str) -> list[str]:
    import paradyse

    texts = []
    model = paradyse.shard(on_meta("llama"))
    before = state(model)
    for path in (folder, other):
        with pytest.raises(ValueError) as error:
            paradyse.load_safetensors(model, path)
        texts.append(str(error.value))
        assert state(model) == before
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    early: Any
    with pytest.raises(RuntimeError) as early:
        compiled(**make_batch("plain", 1, 5))
    texts.append(str(early.value))
    with pytest.raises(ValueError) as early:
        paradyse.full_state_dict(model)
    texts.append(str(early.value))
    return texts


def test_all_ranks_refuse_alike(saved: Any, tmp_path: Path, pool2: RankPool) -> None:
    """A file that is missing, the checkpoint of another model, and a step without any."""
    folder = copied(saved("llama", "several"), tmp_path / "copy")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    one, two = pool2.run(refuse, str(folder), str(saved("gpt2")), timeout_s=100)
    assert one == two
    assert gone.name in one[0] and "missing" in one[0] and "nothing was changed" in one[0]
    assert "21 of the model's tensors are missing: model.embed_tokens.weight" in one[1]
    assert "28 have no place in the model" in one[1]
    for early in one[2:]:
        assert "a sharded tensor of shape [96, 64] is on the meta device" in early.splitlines()[0]
        assert "call paradyse.load_safetensors" in early.splitlines()[0]


def load_after_a_failed_step(folder: str) -> None:
    import paradyse

    model = paradyse.shard(on_meta("llama"))
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager"})
    batch = make_batch("plain", 1, 7)
    with pytest.raises(RuntimeError):
        compiled(**batch)
    watched = weakref.ref(model.lm_head.weight)  # forbids swapping its content
    paradyse.load_safetensors(compiled, folder)
    assert not model.lm_head.weight.local.is_meta and watched() is not model.lm_head.weight
    reference = make_model("llama")
    check(run_step(compiled, model, batch), run_step(reference, reference, batch))


@pytest.mark.broad
def test_load_after_a_failed_step(saved: Any, pool2: RankPool) -> None:
    pool2.run(load_after_a_failed_step, str(saved("llama")), timeout_s=100)


def load_names_twice(folder: str) -> None:
    import paradyse

    model = paradyse.shard(on_meta("gpt2"))
    if folder.endswith("equal"):
        paradyse.load_safetensors(model, folder)
        assert_same(paradyse.full_state_dict(model), make_model("gpt2").state_dict())
        return
    before = state(model)
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tie_word_embeddings=False"):
        paradyse.load_safetensors(model, folder)
    assert state(model) == before


def test_tied_weight_stored_twice(tmp_path: Path, pool2: RankPool) -> None:
    """Equal: read once. One value differs, in a row of the second rank: both ranks refuse."""
    from safetensors.torch import save_file

    tensors = {n: x.clone() for n, x in make_model("gpt2").state_dict().items()}
    for kind in ("equal", "differs"):
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors")
        pool2.run(load_names_twice, str(tmp_path / kind), timeout_s=60)
        tensors["lm_head.weight"][-1, -1] += 1


# Memory


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Into the list: how many bytes this process grew by at most, mapped files included."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    start, done, out = resident(), threading.Event(), [0]

    def watch() -> None:
        while not done.is_set():
            out[0] = max(out[0], resident() - start)
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield out
    finally:
        out[0] = max(out[0], resident() - start)
        done.set()
        thread.join()


def grow(folder: str) -> tuple[int, int]:
    """Bytes that this rank grew by: loading shards, and for comparison reading all."""
    from safetensors.torch import load_file

    import paradyse

    model = paradyse.shard(on_meta("llama", **BIG))
    paradyse.load_safetensors(paradyse.shard(on_meta("llama")), f"{folder}/small")  # imports
    with peak_growth() as ours:
        paradyse.load_safetensors(model, folder)
    with peak_growth() as all_of_it:
        kept = {n: x.clone() for n, x in load_file(f"{folder}/model.safetensors").items()}
    assert kept
    return ours[0], all_of_it[0]


@pytest.mark.broad
def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    model = make_model("llama", **BIG)
    model.save_pretrained(tmp_path)
    make_model("llama").save_pretrained(tmp_path / "small")
    total = sum(4 * p.numel() for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())
    for ours, all_of_it in run_ranks(grow, 4, str(tmp_path), timeout_s=100):
        assert total / 4 * 0.9 < ours < (total + largest) / 4 + 12e6  # its rows, one mapped
        assert ours < 0.6 * total < 0.9 * total < all_of_it


# In one process: whole tensors


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mixtral", "neox"}))
def test_equals_from_pretrained(family: str, saved: Any) -> None:
    """Every parameter and buffer, and what the model computes."""
    import paradyse

    model = on_meta(family)
    paradyse.load_safetensors(model, saved(family))
    _compare(model, type(model).from_pretrained(saved(family)))


def _compare(model: Any, reference: Any) -> None:
    assert_same(model.state_dict(), reference.state_dict())
    buffers = [dict(m.named_buffers(remove_duplicate=False)) for m in (model, reference)]
    assert_same(*buffers)
    logits = [m.eval()(**make_batch("plain", 2, 9)).logits for m in (model, reference)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_rotary_frequencies(rope_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Made by the model's own code, in the dtype that from_pretrained gives them."""
    import transformers

    import paradyse

    rope: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10_000.0}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type in ("llama3", "longrope"):
        rope["original_max_position_embeddings"] = 64
    if rope_type == "longrope":
        rope |= {"short_factor": [1.5] * 8, "long_factor": [2.5] * 8}
    make_model("llama", dtype, rope_parameters=rope).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    paradyse.load_safetensors(model, tmp_path)
    _compare(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
