"""Which error ends the program, and does Ctrl-C still kill it once we have closed the record?"""

from __future__ import annotations

import sys
from contextlib import suppress


def unhandled() -> type[BaseException] | None:
    """The error that ends the program; at a prompt errors end nothing."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)


def keep_interrupt() -> None:
    """Have a program that Ctrl-C ends still die by its signal. The last that we do when the interpreter ends.

    Python notes in a flag of its own that an interrupt was not handled, and asks it at the very end. Whatever is run
    from a string meanwhile, as a named tuple is when it is defined, clears that flag, and another interrupt sets it.
    """
    error = unhandled()
    if error is not None and issubclass(error, KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
