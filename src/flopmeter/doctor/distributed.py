"""Could the ranks of a job on this machine be compared?"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

from flopmeter.doctor._result import Result

ORDER = 70
LIMIT_S = 10.0
NEEDS_TORCH = True

_PATIENCE = timedelta(seconds=5)


def check() -> Result:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Result(standing="missing", says="torch was built without torch.distributed: jobs of one process only")
    if not _notes_arrive():
        return Result(standing="broken", says="a note left in torch's store did not come back: ranks are not compared")
    backends = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    says = f"ranks can leave notes for each other in torch's store; backends here: {', '.join(backends)}"
    return Result(standing="works", says=says, figures={"num_gpus": float(torch.cuda.device_count())})


def _notes_arrive() -> bool:
    """As ranks do it, over a real connection on this machine."""
    from flopmeter.distributed.mailbox import Mailbox

    store: Any = import_module("torch.distributed").TCPStore
    host = store("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    guest = store("127.0.0.1", host.port, is_master=False, timeout=_PATIENCE)
    Mailbox(guest, "doctor").put({"rank 1": b"here"})
    mine = Mailbox(host, "doctor")
    return mine.has(["rank 1"]) and mine.read(["rank 1"]) == [b"here"] and not mine.has(["rank 2"])
