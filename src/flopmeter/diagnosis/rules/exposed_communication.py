"""The ranks wait for each other's gradients, and nothing hides that wait.

How we know. In every step, from the moment the backward pass has computed the last gradient until the gradients of
all ranks have been reduced, this rank was blocked; or a sampled step shows collectives running while nothing else
did.

What to do. Send less often: accumulate gradients and skip the reduction in between (model.no_sync(), FSDP2
set_requires_gradient_sync(False)). Send earlier and in fitting pieces: DistributedDataParallel(bucket_cap_mb=...),
larger for many small tensors, smaller so that the last bucket is short; gradient_as_bucket_view=True saves a copy,
static_graph=True helps with checkpointing. Send fewer bytes: a bf16 compression hook
(default_hooks.bf16_compress_hook). Check that NCCL uses the fast network (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME). With
FSDP, shard within a node (HSDP) and prefetch the next layers. A larger batch per rank hides more.

The gain assumes that most of the wait goes (expected: nine tenths), or half of it (low).
"""

from __future__ import annotations

from flopmeter.diagnosis._evidence import Evidence
from flopmeter.diagnosis._finding import Finding
from flopmeter.text import percent, seconds

MIN_SHARE = 0.05
"""Well-overlapped data parallel training leaves only the last bucket exposed, a few percent."""


def check(evidence: Evidence) -> Finding | None:
    """Look for communication that nothing hides."""
    if evidence.world_size <= 1:
        return None
    share, exposed_s = evidence.share("exposed_communication"), evidence.seconds("exposed_communication")
    if share < MIN_SHARE:
        return None
    return Finding(
        rule="exposed_communication",
        title=f"the ranks wait for communication for {percent(share)} of the time",
        lost=share,
        evidence=(
            f"{seconds(exposed_s / evidence.num_steps)} of every step, with {evidence.world_size} ranks",
            *_slow_network(evidence),
        ),
        advice=(
            "accumulate gradients and skip the reduction in between: model.no_sync()",
            "DistributedDataParallel: tune bucket_cap_mb, set gradient_as_bucket_view=True",
            "send bf16: register_comm_hook(None, default_hooks.bf16_compress_hook)",
            "see that NCCL uses the fast network (NCCL_DEBUG=INFO); raise the batch per rank",
        ),
        gain=evidence.gain(0.9 * exposed_s, low_s=exposed_s / 2, high_s=exposed_s),
    )


def _slow_network(evidence: Evidence) -> tuple[str, ...]:
    event = evidence.window.latest("straggler")
    if event.get("cause") != "slow_network":
        return ()
    return ("all ranks compute at the same pace and wait alike: the network is slow, not a rank",)
