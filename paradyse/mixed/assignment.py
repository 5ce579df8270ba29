"""Which sequences go to groups of which degree, by an integer program over buckets of lengths.

FlexSP (arXiv 2412.01523, section 4.2) has a variable for each bucket and each possible group, so
its program grows with the ranks, and groups of one degree can be exchanged for each other. Here
groups of one way are counted: the program has a variable for each bucket and each way, however
many ranks there are. ``packing`` then fills the groups one by one, which is possible for most of
its answers, as sequences are many and short beside a group.

    least    sum_p d_p n_p                           ranks, of n_p groups of way p
    with     sum_p x_qp = number of sequences in bucket q
             sum_q x_qp t_qp <= n_p (T - fixed_p)    seconds
             sum_q x_qp s_q <= n_p room_p            tokens
             sum_q x_qp u_kqp <= n_p (k - 1)         for k = 2 and 3
             sum_p d_p n_p <= ranks

of which the fourth says that a group has at most one sequence that takes more than half of it, at
most two that take more than a third, and so on: u_kqp is k times the share that a sequence takes,
rounded up, less one (a dual feasible function; Lueker, 1983).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from paradyse.mixed.buckets import bucket_ends
from paradyse.mixed.packing import Bin, Table, arrange, longest_first, pack, slowest, total_s
from paradyse.mixed.ways import Floats

NUM_BUCKETS = 16
"""As FlexSP has it."""
FIRST_STEP, LAST_STEP = 0.08, 0.005
"""By which share a time is tried to be brought down, at first and at last."""


class Buckets:
    """The sequences of a table by length, few buckets of them.

    Args:
        table: the batch.
        order: the sequences, the longest first.
    """

    def __init__(self, table: Table, order: Sequence[int]):
        self.table = table
        ends = bucket_ends([table.lengths[i] for i in order], NUM_BUCKETS)
        number = np.searchsorted(ends, [table.lengths[i] for i in order])
        self.sequences = [[i for i, b in zip(order, number) if b == q] for q in range(len(ends))]
        """Of each bucket, the longest first."""
        lengths = np.asarray(table.lengths)
        self.tokens: Floats = np.array([lengths[of].mean() for of in self.sequences])
        """[buckets] Tokens of a sequence, in the mean."""
        self.adds: Floats = np.stack([table.adds[:, of].mean(1) for of in self.sequences], 1)
        """[ways, buckets] Seconds that a sequence adds, in the mean."""
        self.longest = [of[0] for of in self.sequences]

    def counts(
        self, most_s: float, num_ranks: int, budget: int, limit_s: float
    ) -> list[list[int]] | None:
        """For each way how many sequences of each bucket its groups get.

        Args:
            most_s: seconds in which each group is to be done.
            num_ranks: most of a group.
            budget: ranks of all groups.
            limit_s: seconds for the solver.
        Returns:
            None: there is no answer, or none was found in time.
        """
        table, ways, q = self.table, self.table.ways, len(self.sequences)
        usable = [p for p, w in enumerate(ways) if w.degree <= num_ranks and w.idle_s < most_s]
        if not usable:
            return None
        each = q + 1  # variables of a way: x of each bucket, n
        num = each * len(usable)
        upper = np.zeros(num)
        rows: list[tuple[list[int], Floats, float, float]] = []
        count = np.array([len(of) for of in self.sequences], dtype=float)
        degrees = np.zeros(num)
        for k, p in enumerate(usable):
            way, at = ways[p], each * k
            mine, room_s = [at + b for b in range(each)], most_s - way.fixed_s
            share = np.maximum(self.adds[p] / room_s, self.tokens / way.max_tokens)
            fits = [table.rows[p][i] <= room_s and table.holds(p, i) for i in self.longest]
            upper[at : at + q] = np.where(fits, count, 0)
            upper[at + q] = budget // way.degree
            degrees[at + q] = way.degree
            rows.append((mine, np.append(self.adds[p], -room_s), -np.inf, 0))
            rows.append((mine, np.append(self.tokens, -float(way.max_tokens)), -np.inf, 0))
            for parts in (2, 3):
                whole = np.ceil(np.minimum(share, 1.0) * parts - 1e-9) - 1
                if whole.any():
                    rows.append((mine, np.append(whole, -(parts - 1.0)), -np.inf, 0))
        for b in range(q):
            rows.append(([each * k + b for k in range(len(usable))],
                         np.ones(len(usable)), count[b], count[b]))  # fmt: skip
        rows.append((list(range(num)), degrees, 0, budget))
        matrix = lil_matrix((len(rows), num))
        for r, (columns, values, _, _) in enumerate(rows):
            matrix[r, columns] = values
        bounds = LinearConstraint(matrix.tocsr(), [r[2] for r in rows], [r[3] for r in rows])
        answer = milp(
            degrees,
            constraints=bounds,
            integrality=np.ones(num),
            bounds=Bounds(0, upper),
            options={"time_limit": max(0.01, limit_s), "mip_rel_gap": 0.01},
        )
        if answer.x is None:
            return None
        found = np.rint(answer.x).astype(int).reshape(len(usable), each)
        x = [[0] * q for _ in ways]
        for k, p in enumerate(usable):
            x[p] = found[k, :q].tolist()
        return x


def assign(
    buckets: Buckets,
    order: Sequence[int],
    most_s: float,
    num_ranks: int,
    budget: int,
    limit_s: float,
) -> list[Bin] | None:
    """Groups with all sequences, each done in ``most_s``, where the integer program has an answer
    and groups can be filled by it.

    Args:
        buckets: of the batch.
        order: the sequences, the longest first.
        num_ranks: most of a group; ``budget``: of all groups.
        limit_s: seconds for the solver.
    """
    taken = buckets.counts(most_s, num_ranks, budget, limit_s)
    if taken is None:
        return None
    way_of: dict[int, int] = {}
    for b, sequences in enumerate(buckets.sequences):
        rest = iter(sequences)  # the longest to the ways of most ranks
        by_degree = sorted(range(len(taken)), key=lambda p: -buckets.table.ways[p].degree)
        for p in by_degree:
            way_of.update((next(rest), p) for _ in range(taken[p][b]))
    return pack(buckets.table, order, most_s, num_ranks, budget, way_of)


def tighten(table: Table, micros: list[list[Bin]], num_ranks: int, until: float) -> list[list[Bin]]:
    """``micros`` with groups done sooner, as far as the integer program finds a way in time: first
    all micro-batches as one problem, then each by itself, the slowest first.

    Args:
        table: the batch.
        num_ranks: of the axis.
        until: by ``time.perf_counter``.
    """
    if len(micros) > 1:
        half = (time.perf_counter() + until) / 2
        micros = _tighten(table, micros, num_ranks, half)
    found = []
    for k, bins in enumerate(sorted(micros, key=lambda bins: -slowest([bins]))):
        now = time.perf_counter()
        found += _tighten(table, [bins], num_ranks, now + (until - now) / (len(micros) - k))
    return found


def _tighten(
    table: Table, micros: list[list[Bin]], num_ranks: int, until: float
) -> list[list[Bin]]:
    if time.perf_counter() >= until:
        return micros
    order = longest_first(table, [i for bins in micros for b in bins for i in b.sequences])
    buckets, step, num_micro = Buckets(table, order), FIRST_STEP, len(micros)
    best, most_s = micros, slowest(micros)
    while step >= LAST_STEP and (left := until - time.perf_counter()) > 0:
        aim = most_s * (1 - step)
        bins = assign(buckets, order, aim, num_ranks, num_ranks * num_micro, left)
        found = None if bins is None else arrange(table, bins, num_ranks, num_micro)
        if found is None:
            step /= 2
            continue
        most_s = slowest(found)
        if total_s(found) < total_s(best):
            best = found
    return best
