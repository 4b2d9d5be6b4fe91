"""Which names of torch do we use that are private, or that only some versions have, and what is off without them?

Every such name stands in this file; nothing else of ours touches `torch._C` or its like (a test parses for it). The
oldest torch is 2.6. What a newer name gives is in `LIMITS`: where it is absent the part is off, the header of the run
says so, and nothing else changes. Names without a version are in every torch from 2.6 to 2.15.

Attributes of objects that torch hands out are not listed: `node._sequence_nr`, `tensor._version`, the dictionaries of
hooks of a module or a tensor, `grad_fn._register_hook_dict`, the fields of a DataLoader's iterator.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, update_wrapper
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch._C._autograd import DeviceType as DeviceType
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import profiler as _profiler
from torch.nn.utils.stateless import _reparametrize_module
from torch.profiler import ProfilerActivity
from torch.utils import checkpoint as checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data import dataloader

from flopmeter.errors import too_old_torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

TRIED = ("2.6.0", "2.8.0", "2.9.1", "2.10.0", "2.12.1", "2.13.0", "2.15.0")
"""Versions that `make test-versions` has run on; docs/versions.md has what each of them showed."""
VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]
TOO_OLD: str | None = too_old_torch(torch.__version__)
"""Why nothing is counted with this torch, or None: then steps are only timed."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Inside a backward pass its number, elsewhere -1."""
autograd_node: Callable[[], Any] = torch._C._current_autograd_node
tracing_state: Callable[[], Any] = torch._C._get_tracing_state
"""While `torch.jit.trace` runs a model, its; elsewhere None."""
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
dispatch_mode: Callable[[], Any] = _get_current_dispatch_mode
"""The innermost mode that is on, or None."""


def dispatch_modes() -> list[Any]:
    """All that are on this thread's stack."""
    return [torch._C._get_dispatch_stack_at(place) for place in range(num_dispatch_modes())]


def has_saved_tensor_hooks() -> bool:
    """Whether the program sees what is saved for a backward pass here. Early versions do not tell: perhaps."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


sequence_nr: Callable[[], int] = _get_sequence_nr
"""The number that the next autograd node of this thread gets."""
schemas_of: Callable[[str], Any] = torch._C._jit_get_schemas_for_operator
DisableTorchFunction = torch._C.DisableTorchFunction
"""Around our reads: the user's function modes and tensor classes are not for us."""
EnableTorchFunction: Any = torch._C._EnableTorchFunction
has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Asked first where it counts, because it is cheap."""
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
reparametrize_module: Callable[..., Any] = _reparametrize_module
Convolution = torch.nn.modules.conv._ConvNd
"""What all convolutions have in common."""
LoaderIterator: Any = dataloader._BaseDataLoaderIter
"""Every DataLoader fetches through its `__next__`."""

BACKWARD_ENGINE = (torch.autograd, "_engine_run_backward")
"""`backward()` and `grad()` both call the engine through this name."""
STOP_RECOMPUTATION = "_StopRecomputationError"
"""Of `torch.utils.checkpoint`: how a recomputation ends early. Without it a product that was left early counts."""
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""Its autograd node: what runs in it is a part of the forward pass, once more."""
RECOMPUTATION = (checkpoint, "_recomputation_hook")
"""The context in which a checkpoint that is not reentrant runs its part again."""
SCRIPTING: tuple[tuple[Any, str], ...] = (
    (getattr(torch.jit, "_recursive", None), "create_script_module"),
    (torch.jit, "script"),
)
"""`torch.jit.script` calls the first, by a name that is looked up each time; the second is for a torch without it."""
_FSDP2 = "torch.distributed.fsdp._fully_shard"
FSDP2_WAITS = (
    (f"{_FSDP2}._fsdp_param_group", "FSDPParamGroup", "wait_for_unshard"),
    (f"{_FSDP2}._fsdp_param_group", "FSDPParamGroup", "post_backward"),
    (f"{_FSDP2}._fsdp_state", "FSDPState", "_root_post_backward_final_callback"),
)
"""Where FSDP2 has the computing stream wait: module, class, method."""

IGNORES_COMPILER = hasattr(TorchDispatchMode, "ignore_compile_internals")
OBSERVES_COMPILED = IGNORES_COMPILER and VERSION >= (2, 10)
"""Since 2.9 the compiler can ignore a mode; 2.9 still compiles the model once more, and looks into our hooks."""
HAS_ACTIVITY_FILTERS = "activity_filters" in inspect.signature(_profiler.profile.__init__).parameters
RECORDS_CUSTOM_OPERATORS = VERSION < (2, 14)


class Limit(NamedTuple):
    """A part that some versions cannot have."""

    name: str
    """What torch lacks."""
    since: str
    """The first version that was tried and has it; "before ..." where a newer one has lost it."""
    is_here: bool
    off: str
    """What is off without it."""


LIMITS = (
    Limit(
        "dispatch mode that the compiler ignores (ignore_compile_internals)",
        "2.10",
        OBSERVES_COMPILED,
        "a step that calls compiled code is not observed: its model is counted on shapes",
    ),
    Limit(
        "filter for what the profiler records (activity_filters)",
        "2.12",
        HAS_ACTIVITY_FILTERS,
        "on CUDA no step is profiled unless profile_steps: true or the profiler mode asks for it, because "
        "the tracer would stay attached",
    ),
    Limit(
        "lock around the making of CUDA graphs (graph_capture_lock)",
        "2.13",
        VERSION >= (2, 13),
        'beside mode="reduce-overhead" no step is observed: the model is counted on shapes',
    ),
    Limit(
        "records of custom operators in the profiler",
        "before 2.14",
        RECORDS_CUSTOM_OPERATORS,
        "profiler mode does not see a custom operator that is called through its own object",
    ),
    Limit(
        "reason of a recompilation (CompilationMetrics.recompile_reason)",
        "2.7",
        VERSION >= (2, 7),
        "recompilations are not counted",
    ),
)


def off_here() -> list[str]:
    """What this torch keeps us from doing, each in one line; for the header of a run and for `doctor`."""
    if TOO_OLD is not None:
        return [TOO_OLD]
    found = [f"torch {torch.__version__} has no {limit.name}: {limit.off}" for limit in LIMITS if not limit.is_here]
    return [*found, NEWER] if NEWER else found


def _newer() -> str | None:
    newest = tuple(int(part) for part in TRIED[-1].split(".")[:2])
    if newest >= VERSION:
        return None
    return (
        f"torch {torch.__version__} is newer than any that flopmeter was tried with, the last of which is {TRIED[-1]}"
    )


NEWER = _newer()


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that has no part in what is compiled, on this thread or on another."""

    supports_higher_order_operators = True  # since 2.9; flex attention cannot be counted on shapes without it

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Before 2.9 a frame that is compiled while another kind of mode is on runs eagerly from then on, for good."""
        return not IGNORES_COMPILER


def skip_in_compiler(code: CodeType, *, and_callees: bool) -> None:
    """Tell torch's compiler to run this code as it is. Without these names, hooks fall back to a guard."""
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    strategy, action = getattr(frames, "_FrameExecStrategy", None), getattr(frames, "_FrameAction", None)
    if strategy is not None and action is not None:  # since 2.7
        callees = action.SKIP if and_callees else action.DEFAULT
        frames.set_code_exec_strategy(code, strategy(action.SKIP, callees))
    elif hasattr(frames, "skip_code"):
        frames.skip_code(code)


def outside_compiler(function: _Function) -> _Function:
    """The function as compiled code may call it, an optimizer's step say: it runs as it is, with all that it calls."""
    if VERSION >= (2, 7):
        skip_in_compiler(function.__code__, and_callees=True)
        return function
    frames: Any = torch._C._dynamo.eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        before = frames.set_eval_frame(None)  # 2.6 can be told to skip a function, but not what it calls
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(before)

    skip_in_compiler(run.__code__, and_callees=True)
    return cast(_Function, update_wrapper(run, function))


def is_in_compiled_call() -> bool:
    """Whether a function that torch.compile has wrapped is running, an optimizer's step with our hooks say.

    When it returns, torch puts dispatch back as it was at its start: a mode that was entered inside sees nothing from
    there on, and one that was left inside makes the next operators fail.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame = sys._getframe() if frames is not None else None
    while frame is not None:
        code = frame.f_code
        # Since 2.8 the first name; the second is also that of what `torch.compiler.disable` makes, without a callback.
        is_wrapper = code.co_name == "compile_wrapper" or (code.co_name == "_fn" and "callback" in code.co_freevars)
        if is_wrapper and code.co_filename == frames.__file__:
            return True
        frame = frame.f_back
    return False


def before_compiled_calls(tell: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]) -> tuple[Any, str, Any]:
    """What `replace_attribute` has to replace for us to be told before compiled code runs, or a model is exported.

    Args:
        tell: Called with the function and what it is called with, before the compiler looks at anything.
    """
    frames = import_module("torch._dynamo.eval_frame")  # whoever has made an optimizer has loaded it
    original = frames._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        if callback not in (None, False):  # these are for functions that are not compiled
            called = sys._getframe(1).f_locals
            tell(called.get("fn"), called.get("args", ()), called.get("kwargs", {}))
        return original(callback)

    return frames, "_callback_from_stance", callback_from_stance


def is_beside_cuda_graphs() -> bool:
    """Whether torch.compile makes CUDA graphs in this process (mode "reduce-overhead") and cannot say when."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")  # whoever makes such graphs has loaded it
    if trees is None or hasattr(trees, "graph_capture_lock"):
        return False
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", None)
    return containers is None or bool(containers)


def is_cuda_graph_made() -> bool:
    """Whether torch.compile warms up or records a CUDA graph, as it does in mode "reduce-overhead"."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    lock = getattr(trees, "graph_capture_lock", None)
    return bool(lock.locked()) if lock is not None else is_beside_cuda_graphs()


def num_recompiles() -> int | None:
    """How often torch.compile had to compile the same code again; None when it does not say."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if not hasattr(dynamo, "get_compilation_metrics") or VERSION < (2, 7):
        return None
    return sum(bool(metric.recompile_reason) for metric in dynamo.get_compilation_metrics())


def uses_compiled_autograd() -> bool:
    """There, a callback queued from a hook ends the user's backward pass with an error."""
    dynamo: Any = sys.modules.get("torch._dynamo")  # looking it up on torch would import it
    if dynamo is None:
        return False
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(dynamo.config.compiled_autograd or getattr(autograd, "compiled_autograd_enabled", False))


def queue_callback(callback: Callable[[], None]) -> None:
    """Have it called when the running backward pass has done its work."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def async_collective_tensor() -> Any:
    """The class of tensors that are still on their way, or None."""
    return getattr(import_module("torch.distributed._functional_collectives"), "AsyncCollectiveTensor", None)


def default_store() -> Any:
    """Where the ranks of this job have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def root_mesh(mesh: Any) -> Any:
    """The mesh that this one was cut from, itself where it was cut from none; None when torch does not say."""
    if hasattr(mesh, "_get_root_mesh"):  # since 2.10
        return mesh._get_root_mesh()
    meshes: Any = getattr(import_module("torch.distributed.device_mesh"), "_mesh_resources", None)
    return meshes.get_root_mesh(mesh) if hasattr(meshes, "get_root_mesh") else None


def compile_fx(graph: Any, inputs: Any) -> Any:
    """What torch's usual compiler makes of a graph."""
    return import_module("torch._inductor.compile_fx").compile_fx(graph, inputs)


PROFILER_PATCHED = ("_prepare_trace", "__exit__")
"""Methods of a profiler session that tell of its beginning and its end."""
# Operators only. All of "CPU" would attach CUPTI to trace the CUDA runtime, which slows the run for good.
_OPERATORS = {ProfilerActivity.CPU: {"CPU_OP", "USER_ANNOTATION"}}
# What the device does as well, and which call and which operator it goes back to. Torch counts the link between the two
# among what the CPU does, and refuses a name in the wrong group.
_WITH_KERNELS = {
    ProfilerActivity.CPU: {"CPU_OP", "USER_ANNOTATION", "EXTERNAL_CORRELATION"},
    ProfilerActivity.CUDA: {"CONCURRENT_KERNEL", "GPU_MEMCPY", "GPU_MEMSET", "CUDA_RUNTIME", "CUDA_DRIVER"},
}
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def missing_profiler_name() -> str | None:
    """The first of the names that is gone by which sessions of others are noticed: without them one starts unseen."""
    names = [*((_profiler.profile, name) for name in PROFILER_PATCHED), (_profiler, "_is_profiler_enabled")]
    names.append((torch._C._autograd, "_profiler_enabled"))
    return next((name for owner, name in names if not hasattr(owner, name)), None)


def is_profiler_running() -> bool:
    """Whether any session records now."""
    return bool(_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


def pause_profiler_here() -> None:
    """Record nothing more on this thread."""
    torch._C._autograd._toggle_collection_dynamic(False, {ProfilerActivity.CPU})


@cache
def kineto_thread_end() -> Callable[[], None] | None:
    """Ends the thread that kineto starts with its first session, to read its settings again now and then.

    Found by its names in C++; None where this torch has them not.
    """
    loader = "_ZN9libkineto12ConfigLoader"
    try:
        library = ctypes.PyDLL(torch._C.__file__)  # which knows the names of all libraries that it was linked with
        instance, stop = getattr(library, f"{loader}8instanceEv"), getattr(library, f"{loader}10stopThreadEv")
    except (OSError, AttributeError):
        return None
    instance.restype, stop.argtypes, stop.restype = ctypes.c_void_p, [ctypes.c_void_p], None
    return lambda: stop(instance())


def make_profiler(*, with_shapes: bool, with_kernels: bool) -> _profiler.profile:
    """A session that is not started; it records no more than is asked for, where torch can be told."""
    filters: dict[str, Any] = (
        {"activity_filters": _WITH_KERNELS if with_kernels else _OPERATORS} if HAS_ACTIVITY_FILTERS else {}
    )
    use_device = "cuda" if with_kernels else None
    return _profiler.profile(
        use_kineto=True, use_device=use_device, record_shapes=with_shapes, with_flops=with_shapes, **filters
    )


def input_shapes(raw: Any) -> Any:
    """Of each argument of a recorded operator; lists of tensors have a list of shapes since 2.12, else none."""
    return raw.structured_input_shapes() if hasattr(raw, "structured_input_shapes") else raw.shapes()


def is_launch(raw: Any) -> bool:
    """Whether a recorded event is a call of the CUDA runtime or driver. Before 2.12 only its name tells."""
    if hasattr(raw, "activity_type"):
        return raw.activity_type() in _LAUNCHES
    name: str = raw.name()
    return name.startswith("cuda") or (name.startswith("cu") and name[2:3].isupper())


def unrecorded_operators() -> list[str]:
    """Custom operators of this process, where the profiler does not record a call through their own object."""
    custom: Any = sys.modules.get("torch._library.custom_ops")
    known: Iterable[str] = getattr(custom, "OPDEFS", {})
    return [] if RECORDS_CUSTOM_OPERATORS else sorted(name for name in known if not name.startswith(_OWN_OPERATORS))


_OWN_OPERATORS = ("aten::", "prims::", "_c10d_functional::", "c10d::", "fsdp::", "inductor::", "torch_", "_", "flex")
