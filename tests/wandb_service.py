"""A W&B service of one's own: that of an earlier test in the same process may have died with its children."""

from __future__ import annotations

import contextlib
import os

import wandb
from wandb.sdk.lib.service.service_token import WandbServiceConnectionError


def forget_service() -> None:
    """The next `wandb.init` starts anew. A service that is gone cannot be told to stop, which is no failure."""
    with contextlib.suppress(OSError, WandbServiceConnectionError):
        wandb.teardown()
    # W&B leaves the address of its service here for children; a test that restores the environment restores an old one.
    os.environ.pop("WANDB_SERVICE", None)
