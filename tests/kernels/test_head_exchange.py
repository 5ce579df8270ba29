"""What Ulysses sends and receives: every element at its place, padding 0; kernels as plain code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_device import (
    DEVICE,
    among_nan,
    kernels,
    poisoned_memory,
)
from torch import Tensor

from paradyse.distributed.axis import TokenLayout, local_positions
from paradyse.kernels import head_exchange, triton_exchange
from paradyse.kernels.head_slots import HeadSlots
from paradyse.strategies.groups.heads import deal_heads

PLAIN = {
    "send_heads": head_exchange.send_heads_reference,
    "receive_tokens": head_exchange.receive_tokens_reference,
    "send_tokens": head_exchange.send_tokens_reference,
    "receive_heads": head_exchange.receive_heads_reference,
}
TRITON = {name: getattr(triton_exchange, f"launch_{name}") for name in PLAIN}
IMPLEMENTATIONS = pytest.mark.parametrize(
    "run",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(TRITON, marks=kernels, id="triton"),
    ],
)

CASES = [  # query heads, KV heads, ranks
    (4, 4, 1),
    (4, 2, 2),
    (6, 3, 2),  # a rank has a slot of padding
    (8, 1, 4),  # KV heads are replicated
    (7, 1, 3),  # and query heads padded within a slot
    (2, 2, 3),  # a rank has nothing but padding
    (12, 3, 2),
]
WIDTHS = (5, 5, 3)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


def whole(slots: HeadSlots, n: int, dtype: torch.dtype, b: int = 2) -> list[Tensor]:
    """q, k, v of the whole sequence [B, heads, n, D]."""
    heads = (slots.num_heads, slots.num_kv_heads, slots.num_kv_heads)
    return [torch.randn(b, h, n, w).to(dtype).to(DEVICE) for h, w in zip(heads, WIDTHS)]


def owners(slots: HeadSlots, rank: int) -> list[list[int | None]]:
    """The head that each place of a message to ``rank`` holds, of q, of k and of v; None where it
    is padding.
    """
    n, g, r = slots.slots_per_rank, slots.heads_per_slot, slots.replicas
    queries: list[int | None] = []
    keys: list[int | None] = []
    for slot in range(rank * n, (rank + 1) * n):
        key = slot // r if slot < slots.num_kv_heads * r else None
        keys.append(key)
        for member in range(slot % r * g, slot % r * g + g):
            there = key is not None and member < slots.group
            queries.append(key * slots.group + member if there else None)  # type: ignore[operator]
    return [queries, keys, keys]


def message_of(slots: HeadSlots, rank: int, tensors: list[Tensor]) -> Tensor:
    """[B, s, W] by definition: the heads of ``rank``, side by side."""
    columns = []
    for x, heads in zip(tensors, owners(slots, rank)):
        columns += [torch.zeros_like(x[:, 0]) if h is None else x[:, h] for h in heads]
    return torch.cat(columns, -1)


def rows_of(x: Tensor, p: int, rank: int) -> Tensor:
    """The tokens [.., s, D] of ``rank``, of [.., n, D]."""
    return x[..., local_positions(TokenLayout(p, x.shape[-2]), rank, x.device), :]


def length(p: int, chunk: int) -> int:
    return chunk if p == 1 else 2 * p * chunk


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.float32) for case in CASES]
    + [((8, 1, 4), dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)],
)
def test_every_element_arrives(run: dict, case: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Both ways, between ranks that are played one after the other."""
    arrives(run, case, dtype, length(case[2], 5))


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", [(8, 4, 2), (6, 3, 3), (7, 1, 4)])
def test_an_odd_number_of_tokens_is_one_chunk(run: dict, case: tuple[int, int, int]) -> None:
    for per_rank in (1, 7):
        arrives(run, case, torch.float32, case[2] * per_rank)


def arrives(run: dict, case: tuple[int, int, int], dtype: torch.dtype, num_tokens: int) -> None:
    """Of so many tokens, padding included, each rank gets and gives back what it should."""
    torch.manual_seed(sum(case))
    slots, p = deal_heads(*case), case[2]
    tensors = whole(slots, num_tokens, dtype)
    sent = []
    for r in range(p):
        local = [rows_of(x, p, r) for x in tensors]
        strided = [among_nan(x, i != 1) for i, x in enumerate(local)]
        sent.append(run["send_heads"](slots, strided))
        for to in range(p):
            assert torch.equal(sent[r][to], message_of(slots, to, local))
    returned = []
    for r in range(p):
        tokens = run["receive_tokens"](torch.stack([message[r] for message in sent]))
        assert torch.equal(tokens, message_of(slots, r, tensors))
        real = slots.real_slots(r)
        counts = (real * slots.heads_per_slot, real, real)
        heads = [
            among_nan(x.unflatten(-1, (-1, w)).transpose(1, 2)[:, :c])
            for x, w, c in zip(tokens.split(slots.columns(WIDTHS), -1), WIDTHS, counts)
        ]
        returned.append(run["send_tokens"](slots, heads))
    for r in range(p):
        got = run["receive_heads"](slots, torch.stack([m[r] for m in returned]), WIDTHS)
        want = [rows_of(x, p, r) for x in tensors]
        assert torch.equal(got[0], want[0])
        for x, y in zip(got[1:], want[1:]):  # small multiples are exact but for one rounding
            torch.testing.assert_close(x, y * slots.replicas)
        if run is TRITON:
            assert all(x.transpose(1, 2).is_contiguous() for x in got)


@IMPLEMENTATIONS
def test_queries_travel_alone(run: dict) -> None:
    slots = deal_heads(7, 1, 3)
    q = whole(slots, length(3, 5), torch.float32)[0]
    local = [rows_of(q, 3, r) for r in range(3)]
    sent = [run["send_heads"](slots, [x]) for x in local]
    for to in range(3):
        for r in range(3):
            assert torch.equal(sent[r][to], message_of(slots, to, [local[r]]))
    (back,) = run["receive_heads"](slots, sent[1], WIDTHS[:1])
    assert torch.equal(back, local[1])


@kernels
def test_padding_is_zero_whatever_the_memory_held() -> None:
    slots = deal_heads(2, 2, 3)
    nothing = [torch.empty(1, 0, 6, w, device=DEVICE) for w in WIDTHS]
    for run in (PLAIN, TRITON):
        assert not run["send_tokens"](slots, nothing).any()


@kernels
@pytest.mark.parametrize("widths", [(64, 64, 64), (80, 80, 128)])
def test_kernels_equal_the_reference_over_many_tiles(widths: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    slots, p, n = deal_heads(6, 3, 2), 2, 4 * 43
    heads = (6, 3, 3)
    local = [torch.randn(1, h, n // p, w, device=DEVICE) for h, w in zip(heads, widths)]
    message = PLAIN["send_heads"](slots, local)
    assert torch.equal(TRITON["send_heads"](slots, local), message)
    tokens = PLAIN["receive_tokens"](message)
    assert torch.equal(TRITON["receive_tokens"](message), tokens)
    counts = slots.message_heads(3)
    own = [torch.randn(1, h, n, w, device=DEVICE) for h, w in zip(counts, widths)]
    message = PLAIN["send_tokens"](slots, own)
    assert torch.equal(TRITON["send_tokens"](slots, own), message)
    for x, y in zip(*(run["receive_heads"](slots, message, widths) for run in (PLAIN, TRITON))):
        assert torch.equal(x, y)


def test_a_message_of_two_tensors_is_refused() -> None:
    x = torch.zeros(1, 2, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="1 or 3 tensors, not 2"):
        triton_exchange.launch_send_heads(deal_heads(2, 2, 2), [x, x])
