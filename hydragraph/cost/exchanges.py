"""Elements that an exchange of one bucket moves between ranks, from its home layout and the stages using it."""

from __future__ import annotations

from collections.abc import Sequence

from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import GradientKind, Ints, Layout, propagation
from hydragraph.ir.parameter import Bucket


def elements_sent(
    op: Op, bucket: Bucket, owners: Layout, stages: Sequence[tuple[int, ...]], splits_tokens: bool, ranks: int
) -> Ints:
    """Return the number of elements that each rank sends to each other rank in a pull or a push [ranks, ranks].

    Args:
        op: pull or push.
        bucket: whose weights or gradients move.
        owners: its home layout.
        stages: the ranks of each stage that uses it, in tensor-parallel order.
        splits_tokens: whether ranks of a stage see different tokens, so that their gradients are partial sums.
        ranks: size of the world.
    """
    from hydragraph.ir.link_volume import copied, reduced  # needs numba, which prices without traffic do not

    sums = GradientKind.PARTIAL if splits_tokens else GradientKind.REPLICA
    users = propagation(bucket, stages, {parameter.name: sums for parameter in bucket.parameters})
    return copied(owners, users, ranks) if op is Op.PULL else reduced(users, owners, ranks)
