"""Data movement of a runtime: hydragraph's own, and those of others, so that costs can be compared with their runs."""

from __future__ import annotations

from dataclasses import dataclass

from hydragraph.spec.cluster import Interconnect


@dataclass(frozen=True)
class Stack:
    """A runtime.

    Attributes:
        parts: each tensor-parallel rank sends its part of a hidden state, and the receivers gather the whole; else each
            receiver gets it whole.
        blocking: messages block the stages at both of their ends, which exchange them between two computations; else
            they travel during computation.
        buffer_bytes: maximum size of a message whose sender continues immediately, if `blocking`.
        staging: receivers first allocate a whole hidden state of zeros in pageable host memory, and copy it to the
            device over this link; None: it is allocated on the device.
        all_reduce: gradients are all-reduced over the replicas of a stage, and every replica updates all of its
            weights, after the last backward; else home shards own them (pull and push).
    """

    parts: bool = False
    blocking: bool = False
    buffer_bytes: int = 0
    staging: Interconnect | None = None
    all_reduce: bool = False

    @property
    def own(self) -> bool:
        """Whether it is hydragraph's own."""
        return self == Stack()


# DeepSpeed's pipeline engine over NCCL. From its source: hidden states and their gradients are cut over the
# tensor-parallel ranks (runtime/pipe/engine.py, PartitionedTensor; `pipe_partitioned` and `grad_partitioned` are on by
# default), sends and receives are waited for by the stream that computes (runtime/pipe/p2p.py), a stage alternates with
# its neighbours (runtime/pipe/schedule.py, TrainSchedule), and gradients are reduced at the end in one bucket
# (_exec_reduce_grads). NCCL_BUFFSIZE is 4 MiB by default (NCCL's documentation of its environment variables).
DEEPSPEED = Stack(parts=True, blocking=True, buffer_bytes=4 << 20, all_reduce=True)
