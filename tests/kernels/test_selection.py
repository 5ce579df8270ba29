"""Which calls are plain, which kernel takes them, and what the library's kernels make of a part."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import dense_attention
from torch import Tensor

from paradyse.distributed.axis import TokenLayout
from paradyse.kernels import library_attention, selection
from paradyse.kernels.attention import (
    attention_backward,
    attention_forward,
)
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import (
    DIAGONAL,
    FULL,
    MASKED,
    AttentionSpec,
    Runs,
    Tile,
    kind_of_pair,
    position_intervals,
    run_positions,
    runs_len,
)
from paradyse.kernels.library_attention import (
    library_backward,
    library_forward,
    plain_tile,
    window_tile,
)
from paradyse.kernels.selection import choose, describe_choices, load_table, settled

POSITIONS: list[dict[str, Any]] = [
    {},
    {"right": 0},
    {"left": 5, "right": 0},
    {"left": 100, "right": 0},
    {"right": 2},
    {"left": 3, "right": 3},
    {"chunk": 6},
    {"right": 0, "chunk": 6},
    {"right": 0, "chunk": 64},
]


def visible(q_runs: Runs, kv_runs: Runs, spec: AttentionSpec) -> Tensor:
    """[Sq, Sk] bool."""
    x = position_intervals(q_runs, kv_runs, spec.positional)
    keys = torch.arange(runs_len(kv_runs))
    return (keys >= x.lo[:, None]) & (keys < x.hi[:, None])


def of_tile(tile: Tile, num_rows: int, num_keys: int) -> Tensor:
    inside = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    block = inside[tile.r0 : tile.r1, tile.k0 : tile.k1]
    block.fill_(True)
    if tile.kind == DIAGONAL:
        block.tril_()
    return inside


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_a_plain_tile_is_all_that_is_visible(positions: dict[str, Any]) -> None:
    found = 0
    for p, s in itertools.product((1, 2, 3, 4), (1, 2, 7, 12, 13, 16, 24)):
        layout = TokenLayout(p, s)
        spec = AttentionSpec(seq_len=s, scale=1.0, **positions)
        for r, source in itertools.product(range(p), range(p)):
            runs = layout.runs(r), layout.runs(source)
            tile = plain_tile(*runs, spec)
            if tile is not None:
                found += 1
                want = visible(*runs, spec)
                assert torch.equal(of_tile(tile, *want.shape), want), (p, s, runs, tile)
    assert found


@pytest.mark.parametrize("positions", [*POSITIONS, {"left": 1, "right": 1, "chunk": 4}], ids=str)
def test_a_pair_of_stretches_is_hidden_full_or_masked(positions: dict[str, Any]) -> None:
    stretches = [(a, b) for b in range(13) for a in range(b)]
    spec = AttentionSpec(seq_len=12, scale=1.0, **positions)
    whole = ((0, 12),)
    every = visible(whole, whole, spec)
    for (q0, q1), (k0, k1) in itertools.product(stretches, repeat=2):
        seen = every[q0:q1, k0:k1]
        want = FULL if seen.all() else MASKED if seen.any() else None
        assert kind_of_pair((q0, q1), (k0, k1), spec) == want, (q0, q1, k0, k1)
    assert kind_of_pair((3, 3), (0, 12), spec) is kind_of_pair((0, 12), (13, 12), spec) is None


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("right", [0, None])
def test_every_step_of_a_causal_or_full_ring_is_plain(p: int, right: int | None) -> None:
    for s in (2 * p, 10 * p, 10 * p - 1 if p == 1 else 10 * p):
        layout, spec = TokenLayout(p, s), AttentionSpec(seq_len=s, scale=1.0, right=right)
        for r, source in itertools.product(range(p), range(p)):
            runs = layout.runs(r), layout.runs(source)
            assert plain_tile(*runs, spec) is not None or not visible(*runs, spec).any()


def test_whatever_is_not_position_alone_is_not_plain() -> None:
    runs: Runs = ((0, 8),)
    others: list[dict[str, Any]] = [
        {"key_padding": torch.ones(1, 8, dtype=torch.bool)},
        {"document_ids": torch.zeros(1, 8, dtype=torch.int64)},
        {"bias": torch.zeros(1, 1, 8, 8)},
        {"dropout_p": 0.1, "seed": torch.tensor(0)},
    ]
    for other in others:
        assert plain_tile(runs, runs, AttentionSpec(8, 1.0, right=0, **other)) is None


WINDOWS: list[dict[str, Any]] = [
    {"left": 5, "right": 0},
    {"left": 3, "right": 3},
    {"right": 2},
    {"left": 4},
    {"left": 2, "right": 0, "chunk": 64},
]


@pytest.mark.parametrize("positions", WINDOWS, ids=str)
def test_a_window_tile_is_a_whole_stretch_under_a_window(positions: dict[str, Any]) -> None:
    for s, padding in ((13, 0), (13, 3)):
        runs: Runs = ((0, s + padding),)
        spec = AttentionSpec(seq_len=s, scale=1.0, **positions)
        tile = window_tile(runs, runs, spec)
        assert tile == Tile(0, s, 0, s, MASKED)
        x = torch.arange(s + padding)
        behind = x[:, None] - x
        left, right = (positions.get(k, s) for k in ("left", "right"))
        seen = (behind <= left) & (-behind <= right) & (x < s) & (x[:, None] < s)
        assert torch.equal(visible(runs, runs, spec), seen)


def test_what_is_no_window_over_one_stretch_has_no_window_tile() -> None:
    whole, spec = ((0, 16),), AttentionSpec(16, 1.0, left=3, right=0)
    ring = TokenLayout(2, 16)
    assert window_tile(ring.runs(0), ring.runs(0), spec) is None  # two stretches
    assert window_tile(((0, 8),), ((8, 8),), spec) is None  # other keys
    assert window_tile(whole, whole, AttentionSpec(16, 1.0)) is None  # all is visible
    assert window_tile(whole, whole, AttentionSpec(16, 1.0, right=0, chunk=8)) is None
    for other in (
        {"key_padding": torch.ones(1, 16, dtype=torch.bool)},
        {"document_ids": torch.zeros(1, 16, dtype=torch.int64)},
        {"bias": torch.zeros(1, 1, 16, 16)},
        {"dropout_p": 0.1, "seed": torch.tensor(0)},
        {"softcap": 5.0},
    ):
        assert window_tile(whole, whole, AttentionSpec(16, 1.0, left=3, right=0, **other)) is None


def test_windows_are_tritons_unless_a_table_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "9.0", torch.bfloat16, 128, "window", "forward"
    assert choose(*where).kernel == "triton"
    row = {**ROW, "mask": "window", "direction": "forward", "kernel": "aten_flash"}
    monkeypatch.setenv(selection.VARIABLE, write(tmp_path / "table.json", row))
    assert choose(*where).kernel == "aten_flash"
    monkeypatch.setenv(selection.VARIABLE, "cudnn")
    assert choose(*where).kernel == "triton" and "cannot do windows" in choose(*where).why


def _window(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    runs: Runs = ((0, q.shape[2]),)
    return attention_forward(q, k, v, runs, runs, _window_spec(q, left, right, scale))


def _window_backward(given: Backward, left: int, right: int, scale: float) -> tuple[Any, ...]:
    runs: Runs = ((0, given.q.shape[2]),)
    return attention_backward(given, runs, runs, _window_spec(given.q, left, right, scale))


def _window_spec(q: Tensor, left: int, right: int, scale: float) -> AttentionSpec:
    limits = (None if x < 0 else x for x in (left, right))
    return AttentionSpec(q.shape[2], scale, *limits)


def _compare_windows(dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Whole sequences, of which some end in padding, by the library's kernel."""
    torch.manual_seed(0)
    for positions, padding in itertools.product(WINDOWS, (0, 3)):
        s, runs = 45, ((0, 45 + padding),)
        spec = AttentionSpec(seq_len=s, scale=0.3, **positions)
        shapes = [(2, s + padding, heads, 16) for heads in (4, 2, 2, 4)]
        q, k, v, grad = (torch.randn(x, device=device).to(dtype).transpose(1, 2) for x in shapes)
        got = library_forward(q, k, v, runs, runs, spec)
        assert got is not None
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        at = run_positions(runs, q.device)
        want = dense_attention(*leaves, at, at, spec)
        grads = torch.autograd.grad(want[0], leaves, grad.double())
        back = library_backward(Backward(grad, q, k, v, *got), runs, runs, spec)
        assert back is not None
        for x, y in zip((got[0], *back), (want[0], *grads), strict=True):
            assert float((x.double() - y.detach()).norm() / y.detach().norm()) <= tolerance


def test_flash_attention_is_not_given_what_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than a grid has, and sums of dq that 32 bits do not count."""
    monkeypatch.setattr(library_attention, "capability_of", lambda device: "9.0")
    monkeypatch.setenv(selection.VARIABLE, "aten_flash")
    for batch, heads, tokens, width, holds in (
        (65_535, 1, 8, 16, True),
        (65_536, 1, 8, 16, False),
        (1, 32, 524_288, 128, True),
        (1, 32, 524_289, 128, False),
    ):
        shape = batch, heads, tokens, width
        q = k = v = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        spec, runs = AttentionSpec(tokens, 0.3, right=0), ((0, tokens),)
        found = library_attention.selected_tile(q, k, v, runs, runs, spec, selection.BACKWARD)
        assert (found is not None) == holds, shape


def test_windows_are_put_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins on the CPU for kernels that need a GPU."""
    windows = {"aten_flash": (_window, _window_backward)}
    monkeypatch.setattr(library_attention, "WINDOW_KERNELS", windows)
    monkeypatch.setattr(library_attention, "capability_of", lambda device: "9.0")
    monkeypatch.setattr(selection, "LIBRARY_DTYPES", (torch.float64,))
    monkeypatch.setenv(selection.VARIABLE, "aten_flash")
    _compare_windows(torch.float64, "cpu", 1e-12)


def test_flash_attention_takes_what_it_is_given_of_a_window() -> None:
    """By PyTorch's own account of the operators, on tensors without memory."""
    shapes = [(2, 45, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (
        torch.empty(x, device="meta", dtype=torch.bfloat16).transpose(1, 2) for x in shapes
    )
    forward, backward = library_attention.WINDOW_KERNELS[selection.ATEN_FLASH]
    out, lse = forward(q, k, v, 5, 0, 0.3)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = backward(Backward(grad, q, k, v, out, lse), 5, 0, 0.3)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
def test_windows_of_the_library_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, selection.ATEN_FLASH)
    _compare_windows(torch.bfloat16, "cuda", 2e-2)  # as below


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    spec = AttentionSpec(q.shape[2] + k.shape[2], scale, right=0 if causal else None)
    return attention_forward(q, k, v, ((0, q.shape[2]),), ((0, k.shape[2]),), spec)


def _plain_backward(given: Backward, causal: bool, scale: float) -> tuple[Any, ...]:
    n, n_k = given.q.shape[2], given.k.shape[2]
    spec = AttentionSpec(n + n_k, scale, right=0 if causal else None)
    return attention_backward(given, ((0, n),), ((0, n_k),), spec)


def _compare(dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Parts of a ring by the library's kernels against the definition."""
    torch.manual_seed(0)
    b, h, h_kv, d, s, p = 2, 4, 2, 16, 45, 3
    layout, spec = TokenLayout(p, s), AttentionSpec(s, 0.3, right=0)
    taken = 0
    for r, source in itertools.product(range(p), range(p)):
        runs = layout.runs(r), layout.runs(source)
        n = layout.local_len
        shapes = [(b, n, heads, d) for heads in (h, h_kv, h_kv, h)]
        q, k, v, grad = (torch.randn(x, device=device).to(dtype).transpose(1, 2) for x in shapes)
        got = library_forward(q, k, v, *runs, spec)
        if got is None:
            continue
        taken += 1
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want = dense_attention(*leaves, *(run_positions(x, q.device) for x in runs), spec)
        grads = torch.autograd.grad(want[0], leaves, grad.double())
        finite = want[1] > -torch.inf
        assert torch.equal(got[1] > -torch.inf, finite)
        torch.testing.assert_close(
            got[1].double()[finite], want[1].detach()[finite], rtol=0, atol=10 * tolerance
        )
        back = library_backward(Backward(grad, q, k, v, *got), *runs, spec)
        assert back is not None
        for x, y in zip((got[0], *back), (want[0], *grads), strict=True):
            assert float((x.double() - y.detach()).norm() / y.detach().norm()) <= tolerance
    assert taken >= 6


def test_parts_are_put_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins on the CPU for kernels that need a GPU."""
    monkeypatch.setattr(library_attention, "FORWARD_KERNELS", {"aten_flash": _plain})
    monkeypatch.setattr(library_attention, "BACKWARD_KERNELS", {"aten_flash": _plain_backward})
    monkeypatch.setattr(library_attention, "capability_of", lambda device: "9.0")
    monkeypatch.setattr(selection, "LIBRARY_DTYPES", (torch.float64,))
    _compare(torch.float64, "cpu", 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [selection.ATEN_FLASH, selection.CUDNN])
def test_library_kernels_are_exact(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, kernel)
    _compare(torch.bfloat16, "cuda", 2e-2)  # one rounding of probabilities and of results


ROW = {"capability": "9.0", "dtype": "bfloat16", "width": 128, "mask": "causal"}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text(json.dumps({"rows": list(rows)}))
    return str(path)


def test_the_table_decides_where_it_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**ROW, "direction": "backward", "kernel": "triton"}
    monkeypatch.setenv(selection.VARIABLE, write(tmp_path / "table.json", row))
    ours = choose("9.0", torch.bfloat16, 128, "causal", "backward")
    assert ours.kernel == "triton" and "measured" in ours.why
    own = choose("9.0", torch.bfloat16, 64, "causal", "backward")
    assert own.why.startswith("measured, own table")  # where the file says nothing
    other = choose("8.6", torch.bfloat16, 64, "causal", "backward")
    assert other.kernel == "aten_flash" and "not measured" in other.why
    lines = describe_choices("9.0", torch.bfloat16, 128)
    assert len(lines) == 7 and any(x.startswith("causal backward: triton") for x in lines)


def test_rows_are_of_the_flash_attention_that_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selection.flash_in_use() == selection.OWN_FLASH
    rows = [
        {**ROW, "direction": d, "kernel": kernel, **flash}
        for d, kernel, flash in (
            ("forward", "cudnn", {}),
            ("backward", "triton", {"flash": "FA2"}),
            ("forward", "aten_flash", {"flash": "FA3"}),
        )
    ]
    monkeypatch.setenv(selection.VARIABLE, write(tmp_path / "table.json", *rows))
    found = {}
    for flash in (None, "FA3"):
        monkeypatch.setattr(selection, "current_flash_attention_impl", lambda flash=flash: flash)
        for d in selection.DIRECTIONS:
            found[flash, d] = choose("9.0", torch.bfloat16, 128, "causal", d)
    assert [c.kernel for c in found.values()] == ["cudnn", "triton", "aten_flash", "aten_flash"]
    assert "FA3 is active" in found["FA3", "forward"].why
    assert "not measured" in found["FA3", "backward"].why
    assert "active" not in found[None, "forward"].why


def test_a_kernel_that_cannot_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, "cudnn")
    assert choose("9.0", torch.bfloat16, 128, "full", "forward").kernel == "cudnn"
    cases = [("9.0", torch.float32, 128), ("9.0", torch.bfloat16, 256)]
    cases += [("9.0", torch.bfloat16, 20), ("7.5", torch.float16, 64)]
    for capability, dtype, width in cases:
        choice = choose(capability, dtype, width, "full", "forward")
        assert choice.kernel == "triton" and "cannot" in choice.why


def test_nonsense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(selection.VARIABLE, "fastest")
    with pytest.raises(ValueError, match="'fastest' is neither a kernel"):
        choose("9.0", torch.bfloat16, 128, "full", "forward")
    with pytest.raises(ValueError, match="legal kernels: triton, aten_flash, cudnn"):
        load_table(Path(write(tmp_path / "a", {**ROW, "direction": "forward", "kernel": "best"})))
    with pytest.raises(ValueError, match="cannot read this as a table"):
        load_table(Path(write(tmp_path / "b", ROW)))


def test_a_kernel_that_has_to_be_set_up_is_taken_once_others_lost_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that comes once is not worth a plan; one that comes again and again is."""
    seconds = {"triton": 3e-3, "aten_flash": 4e-3, "cudnn": 2e-3}
    row = {**ROW, "direction": "forward", "kernel": "cudnn", "seconds": seconds}
    row |= {"pairs": 100, "setup_s": 5e-3}
    monkeypatch.setenv(selection.VARIABLE, write(tmp_path / "table.json", row))
    monkeypatch.setattr(selection, "_LOST", {})
    choice = choose("9.0", torch.bfloat16, 128, "causal", "forward")
    assert choice.kernel == "cudnn" and choice.why.endswith("for shapes that come back")
    taken = [settled(choice, "a", 100) for _ in range(8)]
    assert taken == ["triton"] * 5 + ["cudnn"] * 3
    assert settled(choice, "b", 100) == "triton"  # another shape has lost nothing
    large = [settled(choice, "c", 400) for _ in range(3)]
    assert large == ["triton"] * 2 + ["cudnn"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert settled(choice, "a", 100) == "triton"  # whatever ran before
    assert settled(choice, "a", 100) == "cudnn"
    monkeypatch.setattr(selection, "_MOST_SHAPES", 2)
    for shape in ("d", "e", "f"):
        settled(choice, shape, 1)
    assert settled(choice, "a", 100) == "triton"  # forgotten, as it came long ago
    monkeypatch.setenv(selection.VARIABLE, "cudnn")
    asked = choose("9.0", torch.bfloat16, 128, "causal", "forward")
    assert settled(asked, "g", 1) == "cudnn"  # as somebody says so


def test_the_table_of_the_package_can_be_read() -> None:
    table = load_table(selection.MEASURED)
    rows = [row for of in table.values() for row in of if row.kernel == selection.CUDNN]
    assert rows and all(row.setup_s > 0 and row.pairs > 0 and row.tokens for row in rows)


def test_the_row_of_the_nearest_length_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {**ROW, "direction": "forward", "kernel": kernel, "tokens": tokens}
        for tokens, kernel in ((16384, "triton"), (4096, "aten_flash"))
    ]
    monkeypatch.setenv(selection.VARIABLE, write(tmp_path / "table.json", *rows))
    where = "9.0", torch.bfloat16, 128, "causal", "forward"
    found = [choose(*where, tokens).kernel for tokens in (64, 8000, 9000, 10**6, 0)]
    assert found == ["aten_flash", "aten_flash", "triton", "triton", "triton"]
