"""Is this a torch that flopmeter was tried with, and what does it not allow?"""

from __future__ import annotations

from flopmeter.doctor._result import Result

ORDER = 15
LIMIT_S = 20.0
NEEDS_TORCH = True


def check() -> Result:
    import torch

    from flopmeter.torch_compat import TRIED, off_here

    off = off_here()
    tried = f"torch {torch.__version__}; flopmeter was run on {', '.join(TRIED)}"
    return Result(
        standing="falls back" if off else "works",
        says="; ".join([tried, *off]),
        figures={"version": torch.__version__},
    )
