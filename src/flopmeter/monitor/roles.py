"""What does a loop do besides training? Roles that nobody has to name: generation, and what TRL's trainers do.

A trainer is looked at when its first step begins: then its reference model, teacher and reward model are known. What is
not imported when a run begins is not followed, and all of it is taken away again on close.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial, wraps
from sys import modules
from typing import Any

from torch import nn

from flopmeter.hook_hiding import OwnHook, hide_frame, hide_hooks, replace_attribute
from flopmeter.torch_compat import skip_in_compiler

Role = Callable[[str], AbstractContextManager[Any]]

METHODS = {
    **dict.fromkeys(("_generate", "_generate_single_turn", "_generate_vllm"), "generation"),
    **dict.fromkeys(("_calculate_rewards", "_calculate_rewards_from_functions"), "reward"),
    **dict.fromkeys(("_get_per_token_logps_and_entropies", "_compute_kl_logps"), "log_probs"),
    "compute_ref_log_probs": "reference",
}
"""Of TRL's trainers; a call with gradients is training all the same."""
PARTS = {"ref_model": "reference", "teacher_model": "teacher", "reward_model": "reward"}
"""Models that a trainer keeps beside the one that it trains."""


def follow_roles(role: Role) -> Callable[[], None]:
    """Name what transformers and TRL do besides training; gives what ends that."""
    undo: list[Callable[[], None]] = []
    utils, trainer = modules.get("transformers.generation.utils"), modules.get("transformers.trainer")
    if utils is not None:
        mixin = utils.GenerationMixin
        undo.append(replace_attribute(mixin, "generate", _within(role, "generation", mixin.generate)))
    if trainer is not None and "trl" in modules:
        original, known = trainer.Trainer.training_step, set[int]()

        @wraps(original)
        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in known:
                known.add(id(self))
                undo.extend(_follow_trainer(self, role))
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise

        undo.append(replace_attribute(trainer.Trainer, "training_step", training_step))

    def take_away() -> None:
        while undo:
            undo.pop()()

    return take_away


def _follow_trainer(trainer: Any, role: Role) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for kind in type(trainer).__mro__:
        for name in METHODS.keys() & vars(kind).keys() if kind.__module__.startswith("trl.") else ():
            undo.append(replace_attribute(kind, name, _within(role, METHODS[name], vars(kind)[name])))
    for name, own in PARTS.items():
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module) and model is not trainer.model:
            hook = _RoleHook(partial(role, own))
            undo += [
                model.register_forward_pre_hook(hook, prepend=True).remove,
                model.register_forward_hook(hook, always_call=True).remove,
                hide_hooks(model),
            ]
    return undo


def _within(role: Role, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with role(name):
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise

    return call


class _RoleHook(OwnHook):
    """Put before and after a model's forward pass: it is of a role meanwhile."""

    __slots__ = ("_open", "_role")

    def __init__(self, role: Callable[[], AbstractContextManager[Any]]) -> None:
        self._role, self._open = role, ExitStack()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *out: Any) -> None:
        if out:
            self._open.close()
        else:
            self._open.enter_context(self._role())


skip_in_compiler(_RoleHook.__call__.__code__, and_callees=True)
