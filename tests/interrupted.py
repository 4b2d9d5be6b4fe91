"""Another thread at the worst moment: something happens between two instructions of a call, wherever that may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any


def every_moment(make_call: Callable[[], tuple[Callable[..., Any], Callable[[], Any]]]) -> Iterator[Any]:
    """Make a call again and again, each time with something happening before a later one of its instructions.

    Gives what the calls answer. They end when the last instruction was reached.

    Args:
        make_call: Gives a new call, a function or a `partial` of one, and what is to happen in it. Counted are the
            instructions of the file that the function is from.
    """
    for number in count(1):
        call, happening = make_call()
        answer, num_seen = _interrupted(call, happening, number)
        if num_seen < number:
            return
        yield answer


def _interrupted(call: Callable[..., Any], happening: Callable[[], Any], number: int) -> tuple[Any, int]:
    file, num_seen, usual = getattr(call, "func", call).__code__.co_filename, 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_seen
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_seen += 1
            if num_seen == number:
                happening()
        return trace

    sys.settrace(trace)
    try:
        return call(), num_seen
    finally:
        sys.settrace(usual)
