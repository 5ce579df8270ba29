"""Which tiles a call is launched with: those of a device's table, else the package's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paradyse.kernels import flash_plan, flash_runs
from paradyse.kernels.attention_core import Backward
from paradyse.kernels.attention_mask import AttentionSpec
from paradyse.kernels.flash_plan import (
    Config,
    Configs,
    TileKey,
    aligned,
    configs_for,
    load_tiles,
    sums_of_keys,
    tile_row,
)

HOPPER = (9, 0)
FOUND = Configs(Config(256, 64, 8, 4, 2), Config(32, 64, 4, 1), Config(64, 16, 8, 2))


def table(tmp_path: Path, *keys: TileKey) -> Path:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"rows": [tile_row(key, FOUND) for key in keys]}))
    return path


def test_measured_tiles_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = configs_for(HOPPER, 2, 64, False)
    path = table(tmp_path, TileKey(HOPPER, 2, 64))
    assert load_tiles(path) == {TileKey(HOPPER, 2, 64): FOUND}
    monkeypatch.setenv(flash_plan.TILES_VARIABLE, str(path))
    for width in (16, 40, 64):  # of which tiles are as wide
        assert configs_for(HOPPER, 2, width, False) == FOUND
    monkeypatch.delenv(flash_plan.TILES_VARIABLE)
    assert configs_for(HOPPER, 2, 64, False) == own != FOUND


def test_documents_have_tiles_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        flash_plan.TILES_VARIABLE, str(table(tmp_path, TileKey(HOPPER, 2, 64, documents=True)))
    )
    assert configs_for(HOPPER, 2, 64, has_documents=True) == FOUND
    assert configs_for(HOPPER, 2, 64, has_documents=False) != FOUND
    assert configs_for(HOPPER, 2, 64, has_documents=True, has_bias=True) != FOUND


@pytest.mark.parametrize(
    "other",
    [TileKey((10, 0), 2, 64), TileKey(HOPPER, 4, 64), TileKey(HOPPER, 2, 128)],
)
def test_tiles_of_another_device_dtype_or_width_are_not_taken(
    other: TileKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = configs_for(HOPPER, 2, 64, False)
    monkeypatch.setenv(flash_plan.TILES_VARIABLE, str(table(tmp_path, other)))
    assert configs_for(HOPPER, 2, 64, False) == own


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}', '{"rows": [{"capability": [9]}]}'])
def test_a_file_that_is_no_table_says_so(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    monkeypatch.setenv(flash_plan.TILES_VARIABLE, str(path))
    with pytest.raises(ValueError, match="cannot read this as a table of tiles.*tile_sweep"):
        configs_for(HOPPER, 2, 64, False)


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash_plan.TILES_VARIABLE, "/no/such/file")
    with pytest.raises(ValueError, match=r"^/no/such/file: .*FileNotFoundError"):
        configs_for(HOPPER, 2, 64, False)


def test_wide_heads_have_dk_and_dv_one_after_the_other() -> None:
    """Where a thread has no registers for both sums, at the tiles that wgmma needs."""
    for capability, width, launches in ((HOPPER, 128, 1), (HOPPER, 256, 2), ((8, 0), 256, 1)):
        config = configs_for(capability, 2, width, False).keys
        sums = sums_of_keys(config, (width, width))
        assert len(sums) == launches
        assert [sum(of) for of in zip(*sums, strict=True)] == [1, 1]
        assert capability[0] < 9 or config.block_n >= 64


def rows_of(width: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
    """[2, 3, 7, width], of which rows begin ``extra`` elements behind each other."""
    torch.manual_seed(width)
    return torch.randn(2, 7, 3, width + extra).to(dtype)[..., :width].transpose(1, 2)


def test_unlike_widths_are_read_from_where_tiles_are_copied_asynchronously() -> None:
    """Elsewhere ptxas of triton 3.6 gives the products wrong addresses (``unwritten``)."""
    q, v = rows_of(64, torch.bfloat16), rows_of(20, torch.bfloat16, 3)
    read_q, read_v = aligned([q, v])
    assert read_q is q and read_v is not v and torch.equal(read_v, v)
    assert all(n % 16 == 0 for n in read_v.stride()[:3]) and read_v.stride(3) == 1
    moved = rows_of(64, torch.float16, 16)[..., 1:, :].flatten(2).unflatten(2, (6, 64))
    assert torch.equal(aligned([moved, rows_of(16, torch.float16)])[0], moved)


def test_that_is_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[torch.Tensor] = []
    monkeypatch.setattr(flash_runs, "_visibility", lambda *_: None)
    monkeypatch.setattr(flash_runs, "launch_forward", lambda *given: launched.extend(given[:3]))
    monkeypatch.setattr(flash_runs, "launch_backward", lambda given, *_: launched.extend(given[:4]))
    q, k, v, out = (rows_of(n, torch.bfloat16, 3) for n in (64, 64, 20, 20))
    spec, runs = AttentionSpec(7, 0.3, right=0), ((0, 7),)
    flash_runs.forward(q, k, v, runs, runs, spec)
    flash_runs.backward(Backward(out, q, k, v, out, out[..., 0]), runs, runs, spec)
    assert [x.shape[3] for x in launched] == [64, 64, 20, 20, 64, 64, 20]
    assert all(n % 16 == 0 for x in launched for n in x.stride()[:3])


def test_others_are_read_where_they_lie() -> None:
    for given in (
        [rows_of(20, torch.bfloat16, 3), rows_of(24, torch.bfloat16)],  # tiles of one width
        [rows_of(64, torch.float32, 1), rows_of(16, torch.float32, 3)],  # not by wgmma
    ):
        assert all(a is b for a, b in zip(aligned(given), given, strict=True))
