"""What users are told when something is wrong: by the text."""

from __future__ import annotations

import pytest
import torch
from tiny import Mixer, Tiny, tokens

from paradyse.distributed.axis import resolve_axis


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def run(model, ids, **options):
    compiled = torch.compile(model, backend="paradyse", options={"inner": "eager", **options})
    return compiled(ids, ids)


def run_on_ranks(model, shape, options):
    run(model(), tokens(*shape), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"plann": "auto"}, "plann.*plan"),
        ({"plan": "megatron"}, "megatron.*megatron_ts"),
        ({"strategies": ["ulysses"]}, "ulysses.*ulysses_z"),
        ({"inner": "nvcc"}, "nvcc"),
        ({"memory_limit": "80 parsecs"}, "80 parsecs"),
        ({"smoothing": -1}, "smoothing"),
    ],
)
def test_options(options, text):
    with pytest.raises(Exception, match=f"(?s){text}"):
        run(Tiny(), tokens(2, 7), **options)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0)])
def test_an_empty_batch_names_the_input_and_its_shape(shape):
    with pytest.raises(ValueError, match=r"'ids' has shape \[.*0.*\].*at least 1"):
        run(Tiny(), tokens(*shape))


def test_a_mask_of_the_wrong_shape_names_both_shapes():
    compiled = torch.compile(Tiny(), backend="paradyse", options={"inner": "eager"})
    with pytest.raises(Exception, match=r"(?s)7.*9|9.*7"):
        compiled(tokens(2, 7), tokens(2, 7), torch.ones(2, 1, 7, 9, dtype=torch.bool))


def test_plans_of_the_wrong_length_and_unsplittable_operators(ranks):
    pool = ranks(2)
    from harness import RankFailure

    cases = [
        (Tiny, {"plan": ["ulysses_z"]}, r"1 names given, but the model has 2 layers"),
        (Tiny, {"plan": {"mlp": ["metp"] * 3}}, r"3 names given, but the model has 2 mlp"),
        (Mixer, {"on_unsupported": "error"}, r"cannot split .*fft.*on_unsupported=\"gather\""),
    ]
    for model, options, text in cases:
        with pytest.raises(RankFailure, match=f"(?s){text}"):
            pool.run(run_on_ranks, model, (2, 7), options)


def test_a_mesh_without_a_process_group():
    class Mesh:
        ndim = 1

    with pytest.raises(ValueError, match="init_process_group first"):
        resolve_axis(Mesh())


def three_axes():
    from torch.distributed.device_mesh import init_device_mesh

    resolve_axis(init_device_mesh("cpu", (1, 1, 2)))


def outside():
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 1:
        try:
            resolve_axis(mesh)
        except ValueError as e:
            return str(e)
    return ""


def too_large():
    from torch.distributed.device_mesh import init_device_mesh

    try:
        resolve_axis(init_device_mesh("cpu", (4,)))
    except (RuntimeError, ValueError) as e:
        return str(e)
    return ""


def test_meshes_that_do_not_fit(ranks):
    from harness import RankFailure

    pool = ranks(2)
    with pytest.raises(RankFailure, match=r"mesh has 3 axes; give 1 \(sequence\) or 2"):
        pool.run(three_axes)
    assert "rank 1 is not part of the mesh" in pool.run(outside)[1]
    assert "4" in pool.run(too_large)[0]
