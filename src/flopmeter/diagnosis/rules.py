"""Which causes of lost time are looked for, and how? One function a cause; where causes differ in data alone, a table.

What a rule means, how it knows and what to do stands in findings.md beside this file. Rules do not know each other: who
takes precedence is said by `explains` in the table at the end.
"""

from __future__ import annotations

import math
import operator
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import repeat
from statistics import median
from typing import Any

from msgspec.structs import replace

from flopmeter.columns import known, mapping, number_or_nan, sound
from flopmeter.devices import find_device
from flopmeter.devices.kernels import is_communication, is_matmul, short_name
from flopmeter.devices.roof import throttling
from flopmeter.diagnosis.evidence import (
    LIGHT_OPTIMIZERS,
    LIKELY,
    MATMULS,
    MAX_COUNT,
    MUCH_MOVED,
    STARVED,
    Evidence,
    Finding,
    Gain,
    NotCheckedError,
    Rule,
)
from flopmeter.errors import FlopmeterError
from flopmeter.text import clean, percent, rate, seconds, utilisation
from flopmeter.waterfall import LABELS

# Waiting for data, and for a core


BUSY_SHARE = 0.5
"""From here on a loader computes rather than waits: the larger part of its time is CPU time. A worker that reads a slow
disk stays below a fifth; one that computes shares its core with the training, and so stays below 1."""


def data_wait(e: Evidence, rule: Rule) -> Finding | None:
    """A wait for data in which the loader computes (cpu_preprocessing), or does not (data_stall)."""
    wait_s, is_stall = e.seconds("data_wait"), rule.name == "data_stall"
    if e.loader_busy is None and not is_stall and wait_s / e.wall_s >= rule.threshold:
        raise NotCheckedError("the loader's CPU time was not recorded (workers need psutil)")
    if ((e.loader_busy or 0.0) < BUSY_SHARE) is not is_stall:
        return None
    why = ", while the loader computes"
    if is_stall:
        why = ", and the loader is not computing" if e.loader_busy is not None else ""
        wait_s = max(wait_s - e.loader_starved_s, 0.0)
    found = (f"{seconds(wait_s / e.num_steps)} of every step are spent waiting for the next batch", e.loader_evidence())
    return e.finding(rule, f"the steps wait for data for {{}} of the time{why}", wait_s, found)


def cpu_contention(e: Evidence, rule: Rule) -> Finding | None:
    """A process that gets less of a core than it wants."""
    if e.is_gpu:
        return None
    if e.cpu_wait is None or e.cpu_share is None:
        raise NotCheckedError("how long the training thread waited for a core was not sampled (Linux tells it)")
    lost_s = e.cpu_wait * e.wall_s
    found = f"the training thread was ready to run for {e.percent(lost_s)} of the time and had no core"
    title = f"the process gets {percent(e.cpu_share)} of the CPU time that it needs, which costs {{}} of the time"
    return e.finding(rule, title, lost_s, (found,))


# The host


def own_code(e: Evidence, rule: Rule) -> Finding | None:
    """Time of the loop's own code."""
    lost_s = e.seconds("own_code")
    reads = _reads(e) if e.has_many_reads else ""
    frames = e.window.latest("frames").get("top")
    rows = [row for row in frames[:4] if isinstance(row, list) and len(row) > 1] if isinstance(frames, list) else []
    shares = [(clean(row[0], 80), number_or_nan(row[1])) for row in rows]
    longest = ", ".join(f"{place} {percent(share)}" for place, share in shares if share <= 1)
    found = [f"{seconds(lost_s / e.num_steps)} of every step lie outside data, forward, backward and update"]
    found += [f"in it {reads}"] if reads else []
    found += [f"most of it in: {longest}"] if longest else []
    title = "the loop's own code takes {} of the time, outside data, forward, backward and update"
    return e.finding(rule, title, lost_s, found, saved=(0.1, 0.5, 1.0))


READ_CALLS = r"::item$|_local_scalar_dense|is_nonzero"
READ_S = 1e-4
"""What reading a value takes on a CPU at most: a call that takes longer was interrupted."""


def host_sync(e: Evidence, rule: Rule) -> Finding | None:
    """Reads of device values, as far as they cost something."""
    e.need_facts()
    if not e.host_syncs:
        return None
    if e.sampled is None:
        raise NotCheckedError("values are read by the host, but no step was sampled to tell what that costs")
    calls_s = 0.0 if e.is_gpu else min(e.top_s(READ_CALLS), sum(e.host_syncs.values()) * READ_S) * e.num_steps
    lost_s = calls_s + e.sync_gap_s
    cost = f"{'the gaps behind them' if e.is_gpu else 'the calls'} took {e.percent(lost_s)} of the time"
    all_s = max(e.seconds_or_zero("launch_gaps"), 0.0) if e.is_gpu else calls_s
    title = f"the loop reads values {'from the device ' * e.is_gpu}{_times(e)}, which costs {{}} of the time"
    saved = (0.5, LIKELY, max(all_s / lost_s, 1.0) if lost_s else 1.0)
    return e.finding(rule, title, lost_s, (_reads(e), cost), saved=saved)


def _times(e: Evidence) -> str:
    return "once a step" if (num := round(sum(e.host_syncs.values()))) == 1 else f"{num:,} times a step"


def _reads(e: Evidence) -> str:
    """How often and where values are read; empty where none is."""
    where = ", ".join(e.facts.host_sync_places)
    ops = ", ".join(f"{op} x {num:.0f}" for op, num in sorted(e.host_syncs.items(), key=lambda row: -row[1])[:4])
    return f"values are read {_times(e)}: {ops}" + (f"; at {where}" if where else "") if ops else ""


OPERATOR_S = 7.5e-6
"""What an eager operator on a CPU takes before it computes: dispatch, autograd, memory. Set on the demo's GPT."""


MUCH_FIXED, SURELY_FIXED = 0.2, 0.1
"""Share of the time from which on the fixed cost of a step is a finding, and how much of it must be sure, where chance
may have put the rest of it into the gaps."""


def kernel_launch(e: Evidence, rule: Rule) -> Finding | None:
    """A high fixed cost a step."""
    e.share("launch_gaps")
    gap_s = max(e.launching_s - e.sync_gap_s, 0.0)
    update_s = e.seconds_or_zero("optimizer") if e.facts.optimizer in LIGHT_OPTIMIZERS else 0.0
    found = [f"nothing runs for {e.percent(gap_s)} of the time, while the host prepares operators"]
    if update_s:
        found.append(f"the update takes {e.percent(update_s)}, whatever the batch size")
    if e.num_ops:
        found.append(f"{e.num_ops:.0f} operators a step")
    verdicts = [mapping(event.get("verdict")) for event in e.window.events("device_time")]
    told = [verdict for verdict in verdicts if verdict.get("bound") in ("host", "device")]
    if told and told[-1].get("bound") == "host":
        found.append(clean(told[-1].get("reason")))
    fixed_s = gap_s + _starting_s(e) + update_s
    if fixed_s < MUCH_FIXED * e.wall_s:
        return None
    title = "each step does too little work: {} of the time is the fixed cost of a step"
    sure_s = fixed_s - min(e.chance_s("launch_gaps"), gap_s)
    return e.finding(rule, title, sure_s, found, saved=(0.5, 15 / 16, 1.0))


def _starting_s(e: Evidence) -> float:
    """What the operators of the window took before they computed, each at most its own time; a GPU shows it as gaps."""
    if e.is_gpu or e.sampled is None:
        return 0.0
    operator_s = OPERATOR_S * max(e.sampled.kept, 1.0)  # what stretches the steps stretches that, too
    rows = [(own_s, num) for name, own_s, num in e.sampled.top if not re.search(READ_CALLS, name)]
    listed_s = math.fsum(min(own_s, num * operator_s) for own_s, num in rows)
    others = max(e.num_ops - math.fsum(num for _, num in rows) - sum(e.host_syncs.values()), 0.0)
    working_s = e.seconds_or_zero("card_below_peak", "matmul_below_peak", "non_matmul") / e.num_steps
    left_s = max(working_s - math.fsum(own_s for own_s, _ in rows), 0.0) if rows else working_s
    starting_s = min(listed_s + min(others * operator_s, left_s), working_s)
    return e.num_steps * max(min(starting_s, e.num_ops * operator_s), 0.0)


def gc_pause(e: Evidence, rule: Rule) -> Finding | None:
    """Time spent on collecting garbage."""
    events = e.window.events("gc")
    if not events:
        raise NotCheckedError("garbage collections were not recorded (event `gc`)")
    num = math.fsum(known((event.get("num") for event in events), MAX_COUNT))
    longest_s = max(known(event.get("longest_s") for event in events), default=math.nan)
    longest = "" if math.isnan(longest_s) else f", the longest of {seconds(longest_s)}"
    found = (f"{num:.0f} collections in {seconds(e.window.gc_s)}{longest}, in {e.num_steps} steps",)
    return e.finding(rule, "Python's garbage collector takes {} of the time", e.window.gc_s, found)


PAUSES = {
    "checkpoint_pause": (r"checkpoint|ckpt|save|saving", "checkpoints", (0.5, LIKELY, 1.0)),
    "eval_pause": (r"eval|valid|test", "evaluation", (0.25, 0.5, 0.8)),
}
"""By rule: names of pauses, what they are for, and what is saved."""


def pauses(e: Evidence, rule: Rule) -> Finding | None:
    """Time that the training stands still for something that somebody wants."""
    names, purpose, saved = PAUSES[rule.name]
    title = "training stands still for evaluation for {} of the time"
    if rule.name == "checkpoint_pause":
        title = "training stands still for {} of the time while checkpoints are written"
    pause_s = e.pause_s(names)
    found = (f"{seconds(pause_s)} of {seconds(e.wall_s)} are pauses for {purpose}",)
    return e.finding(rule, title, pause_s, found, saved=saved)


def side_passes(e: Evidence, rule: Rule) -> Finding | None:
    """Passes without gradients that are no evaluation, and generation."""
    lost_s = e.seconds_or_zero("no_grad", "generation")
    named = [f"{LABELS[part].lower()}: {e.percent(e.seconds(part))}" for part in rule.parts if e.seconds_or_zero(part)]
    title = "passes without gradients take {} of the time"
    if e.seconds_or_zero("generation") > 0.9 * lost_s:
        title = "generation takes {} of the time"
    return e.finding(rule, title, lost_s, [f"{each} of the time" for each in named], saved=(0.0, 0.5, 0.9))


# Ranks


def exposed_communication(e: Evidence, rule: Rule) -> Finding | None:
    """Communication that nothing hides, less what ranks that compete for cores wait for each other."""
    if e.world_size <= 1:
        return None
    is_starved = (e.cpu_share or 1.0) < STARVED and not e.is_gpu
    exposed_s = max(e.seconds("exposed_communication") - (e.cpu_wait or 0.0) * e.wall_s * is_starved, 0.0)
    found = [f"{seconds(exposed_s / e.num_steps)} of every step, with {e.world_size} ranks"]
    if e.window.latest("straggler").get("cause") == "slow_network":
        found.append("all ranks compute at the same pace and wait alike: the network is slow, not a rank")
    title = "the ranks wait for communication for {} of the time"
    return e.finding(rule, title, exposed_s, found, saved=(0.5, 0.9, 1.0))


UNNAMED_SHARE = 0.1
"""Least loss where the monitor has not named a rank yet: a few intervals differ by chance more than many."""


def straggler(e: Evidence, rule: Rule) -> Finding | None:
    """A rank that the monitor named, or that all statistics point to."""
    if e.world_size <= 1:
        return None
    named, statistics = e.window.latest("straggler"), e.window.events("ranks")
    if not named and not statistics:
        raise NotCheckedError("the record has no statistics of the other ranks")
    if not named and (e.cpu_share or 1.0) < STARVED:
        raise NotCheckedError("the ranks compete for cores, and a few exchanges do not tell one that always loses")
    num_steps: float = e.num_steps
    if named.get("cause") == "slow_peer":
        rank, since = (str(named.get(key))[:20] for key in ("rank", "since_step"))
        extra_s, phase = number_or_nan(named.get("extra_s")), _phase_name(named.get("phase"))
        where = f"host {clean(named.get('host') or '', 80)}, since step {since}"
        if not math.isnan(first := number_or_nan(named.get("since_step"))):
            num_steps = e.window.count_from(first)
    elif named or (pointed := _pointed_to(statistics)) is None:
        return None
    else:
        rank, extra_s, phase, where = pointed
    lost_s = extra_s * num_steps
    if not lost_s / e.wall_s >= (rule.threshold if named else UNNAMED_SHARE):
        return None
    found = [f"its own time exceeds the others' by {seconds(extra_s)} a step, in {phase}", where]
    found.append(f"that is {e.percent(lost_s)} of the time of {e.world_size} ranks")
    return e.finding(rule, f"rank {rank} holds up all others for {seconds(extra_s)} a step", lost_s, found)


def _pointed_to(events: Sequence[Mapping[str, Any]]) -> tuple[str, float, str, str] | None:
    """The rank with the longest own time in every exchange; None when they do not agree."""
    all_stats = [mapping(event.get("stats")) for event in events]
    ranks = {str(mapping(stats.get("own_s")).get("argmax")) for stats in all_stats}
    if len(ranks) != 1 or ranks == {"None"}:
        return None
    extras_s = [_ahead_s(mapping(event.get("stats")).get("own_s"), event) for event in events]
    blocked_s = [number_or_nan(mapping(stats.get("blocked_s")).get("max")) for stats in all_stats]
    if median(extras_s) < median(blocked_s) / 2:  # the others wait for something else: the network
        return None
    no_phase = ("step_s", "own_s", "blocked_s", "memory_bytes")
    phases = {name: _ahead_s(values, events[-1]) for name, values in all_stats[-1].items() if name not in no_phase}
    known_phases = {name: ahead_s for name, ahead_s in phases.items() if not math.isnan(ahead_s)}
    phase = max(known_phases, key=lambda name: known_phases[name], default="an unknown phase")
    return ranks.pop()[:20], median(extras_s), _phase_name(phase), f"in all of {len(events)} exchanges"


def _ahead_s(values: Any, event: Mapping[str, Any]) -> float:
    """By how much the slowest rank exceeds the mean of the others; NaN when unknown."""
    size = number_or_nan(event.get("world_size"))
    highest_s, mean_s = (number_or_nan(mapping(values).get(key)) for key in ("max", "mean"))
    return (highest_s - mean_s) * size / (size - 1) if size > 1 else math.nan


def _phase_name(phase: Any) -> str:
    return str(phase)[:40].removesuffix("_s").replace("_", " ")


# The model


def memory_bound(e: Evidence, rule: Rule) -> Finding | None:
    """A high share of operators other than matmuls, of which no more is claimed than is sure."""
    if e.share("non_matmul") < MUCH_MOVED:
        return None
    moving_s = e.least_s("non_matmul")
    rows = e.sampled.top if e.sampled else ()
    own = [row for row in rows if not (is_matmul(row[0]) or is_communication(row[0]) or _OTHERS.search(row[0]))]
    longest = ", ".join(f"{short_name(name)[:60]} {seconds(own_s)}" for name, own_s, _ in own[:4])
    found = (f"the longest of them in a step: {longest or 'not recorded'}",)
    saved = None if e.facts.is_compiled else (0.1, 1 / 3, 2 / 3)
    return e.finding(rule, "operators other than matmuls take {} of the time", moving_s, found, saved=saved)


SURELY_MOVED = 0.15
"""Share of the time that must be sure, where chance may have put the rest of it there."""
_OTHERS = re.compile(r"mm(_|$)|conv|gloo|memcpy|optimizer|fused_?adam", re.IGNORECASE)
"""Names of matmuls, communication and updates on a CPU, and of copies: none of these operators."""
_SCORES = r"(?<!log_)softmax|masked_fill|::where|::tril|::triu"
_PASSES = r"::(mul|div|add|copy)_?$"
_PRODUCTS = r"::(bmm|baddbmm)"
_SCORE_KERNELS = r"softmax_warp|(?<!Log)SoftMax(Forward|Backward)Epilogue|masked_fill|where_kernel|tri[lu]_kernel"
_PASS_KERNELS = r"MulFunctor|DivFunctor|CUDAFunctor_?add|direct_copy"
MAX_PASSES = 1.5
"""Scaling, adding the mask and copying take at most so many times as long as softmax and masking do; what exceeds that
is other code's."""


def eager_attention(e: Evidence, rule: Rule) -> Finding | None:
    """Attention that is spelled out."""
    seen = e.need_facts().attention
    if seen is None:
        return None
    calls, length, modules = seen
    scores_s = e.top_s(_SCORE_KERNELS if e.is_gpu else _SCORES) * e.num_steps
    passes_s = min(e.top_s(_PASS_KERNELS if e.is_gpu else _PASSES) * e.num_steps, MAX_PASSES * scores_s)
    products_s = e.top_s(_PRODUCTS) * e.num_steps  # on a GPU they cannot be told from other matmuls
    saved_s = scores_s + passes_s
    places = f": {', '.join(modules)}" if modules else ""
    found = [f"{calls} softmaxes over {length} x {length} scores in a step{places}"]
    title = "attention is spelled out instead of fused"
    if e.sampled is None:
        found.append("no step was sampled, so what it costs is not known")
        return e.finding(rule, title, None, found, saved=None)
    if not saved_s:
        return None
    products = "" if e.is_gpu else f", their matmuls {e.percent(products_s)}"
    found.append(f"scores {e.percent(saved_s)}{products} of the time")
    saved = (scores_s / 2 / saved_s, 1.0, 1 + products_s / 2 / saved_s)
    return e.finding(rule, f"{title}, which costs {{}} of the time", saved_s, found, saved=saved)


MIN_FLOP_SHARE = 0.1
"""Share of the matmul FLOPs: a head or a loss in float32 is common and meant."""


def fp32_matmul(e: Evidence, rule: Rule) -> Finding | None:
    """FLOPs in a format that is slower than it need be."""
    if not e.flop_shares:
        raise NotCheckedError("no observed step counted its matmuls by dtype")
    matmul_s = e.seconds_or_zero(*MATMULS)  # without a sampled step, what it takes at least
    if (share := e.flop_shares.get("fp64", 0.0)) >= MIN_FLOP_SHARE:
        lost_s = e.work_s * share / 2
        title = f"{percent(share)} of the matmul FLOPs are float64, which is hardly ever meant"
        found = [f"{percent(share)} of the matmul FLOPs of the observed step ran in float64"]
        saved = (matmul_s * share / 2 / lost_s if lost_s else 0.0, 1.0, 1.2)
    else:
        share = e.flop_shares.get("fp32", 0.0)
        if share < MIN_FLOP_SHARE or e.facts.tf32:
            return None
        if not e.is_gpu:
            raise NotCheckedError("float64 was not seen; whether this CPU is faster in bf16 is not in the record")
        try:
            peaks = find_device(e.device).peak_flop_per_s
        except FlopmeterError as error:
            raise NotCheckedError(f"what this device could do is not on file: {error}") from None
        fp32_peak = peaks.get("fp32", math.inf)
        faster = [dtype for dtype in ("bf16", "tf32") if dtype in peaks and peaks[dtype] > fp32_peak]
        if not faster:
            return None
        best = max(faster, key=lambda dtype: peaks[dtype])
        ratio = peaks[best] / fp32_peak
        lost_s = matmul_s * share * (1 - 1 / ratio) / 2
        title = f"{percent(share)} of the matmul FLOPs are float32, and {best} would be {ratio:.3g} times as fast"
        found = [f"{percent(share)} of the matmul FLOPs of the observed step ran in float32, TF32 is off"]
        found.append(f"peaks on file: {best} {rate(peaks[best])}, fp32 {rate(fp32_peak)}")
        saved = (0.5, 1.0, 2.0)
    finding = e.finding(rule, title, lost_s, found, saved=saved)
    return finding and replace(finding, mfu_after=None)  # in another format, another peak holds


MIN_WASTE = 0.1
"""A tenth of the work: below, the lengths within a batch are about as even as they get."""


def padding_waste(e: Evidence, rule: Rule) -> Finding | None:
    """Work on padding."""
    useful, processed = e.mean("perf/mfu"), e.mean("perf/mfu_processed")
    waste = 1 - useful / processed if 0 < useful < processed else 0.0
    if waste < MIN_WASTE:
        return None
    saved_s = waste * max(e.work_s - e.seconds_or_zero("optimizer"), 0.0)
    shown = f"MFU is {utilisation(useful)} with useful tokens and {utilisation(processed)} with all tokens processed"
    found = e.finding(rule, f"{percent(waste)} of the work is done on padding", saved_s, (shown,), saved=(1, 1, 1))
    if found is None or found.gain is None:
        return found
    # Packed steps take as long as padded ones, and do more: the gain is in useful work a second.
    shorter, filled, likely = found.gain.expected, processed / useful - 1, 1 / (1 - LIKELY * waste) - 1
    low, expected, high = sorted((min(shorter, filled), likely, max(shorter, filled)))
    mfu_after = found.mfu_after and min((e.waterfall.mfu or 0.0) * (1 + expected), 1.0)
    return replace(found, gain=Gain(low=low, expected=expected, high=high), mfu_after=mfu_after)


FULL_MEMORY = 0.8
"""From here on the activations that checkpointing saves would hardly fit."""


def recompute(e: Evidence, rule: Rule) -> Finding | None:
    """Recomputation that there is room to do without."""
    again_s, memory = e.least_s("recompute"), e.resource("resource/gpu_memory_share")
    if memory is not None and memory >= FULL_MEMORY:
        return None
    room = "how full the memory is was not recorded: try whether the run fits without"
    found = [f"{seconds(again_s / e.num_steps)} of every step are recomputation in the backward pass"]
    found.append(room if memory is None else f"the GPU's memory is {percent(memory)} full")
    return e.finding(rule, "{} of the time goes into computing activations a second time", again_s, found)


MANY_OPS = 4.0
"""Operators per parameter tensor from which the update counts as a loop: a foreach update has a few dozen in all."""
FUSED_LENGTHS, LOOP_LENGTHS = 7, 3
USUAL_OPS = 9.0
"""Operators per tensor of torch's own AdamW loop, where none was counted."""
HEAVY_SHARE = 0.1
"""Share of the update: a fused one of a model with a sensible batch stays below a twentieth."""


def optimizer_heavy(e: Evidence, rule: Rule) -> Finding | None:
    """An update that is a loop, and matters."""
    share, update_s = e.share("optimizer"), e.seconds("optimizer")
    kind, num_ops, num_tensors = e.facts.optimizer, e.facts.num_optimizer_ops, e.facts.num_parameter_tensors
    if share < HEAVY_SHARE or kind in LIGHT_OPTIMIZERS:
        return None
    per_tensor = num_ops / num_tensors if num_ops and num_tensors else None
    if kind != "for-loop":
        if per_tensor is None:
            raise NotCheckedError("how the optimizer does its update was not seen (event `facts`)")
        if per_tensor < MANY_OPS:
            return None
    left = min(FUSED_LENGTHS / (LOOP_LENGTHS * (per_tensor or USUAL_OPS)), 0.5)
    counted = f": {num_ops:.0f} operators for {num_tensors:.0f} tensors" if per_tensor else ""
    title = f"the update of the weights is a loop over tensors and takes {percent(share)} of the time"
    found = [f"{seconds(update_s / e.num_steps)} of every step are the optimizer's"]
    found.append(f"its update goes tensor by tensor{counted}")
    return e.finding(rule, title, update_s * (1 - left), found, saved=(0.5 / (1 - left), 1.0, 1 / (1 - left)))


MIN_ODD = 0.02
"""Below, the odd modules are small."""
MIN_RECOMPILES = 8
"""torch's own limit (recompile_limit), after which it falls back to eager code."""


def ragged_shapes(e: Evidence, rule: Rule) -> Finding | None:
    """Odd sizes, and recompilations."""
    facts = e.need_facts()
    odd = facts.odd_sizes if e.is_gpu else ()
    by_module = mapping(e.window.latest("count").get("by_module"))
    total = math.fsum(known(by_module.values(), MAX_COUNT))
    share = float(bool(odd))  # all of the FLOPs where no count names modules
    if odd and total:
        names = {module for module, _, _ in odd}
        share = math.fsum(known((flop for name, flop in by_module.items() if name[:60] in names), MAX_COUNT)) / total
    odd_s = share * max(e.seconds_or_zero("matmul_below_peak"), 0.0)
    compiled_s = e.pause_s("compile")
    lost_s = odd_s / 2 + compiled_s
    if facts.num_recompiles < MIN_RECOMPILES and odd_s / 2 / e.wall_s < MIN_ODD:
        return None
    found = [f"{module}: {dimension} {size}" for module, dimension, size in odd[:4]]
    if facts.num_recompiles:
        shapes = f", for {facts.num_shapes:.0f} shapes" if facts.num_shapes else ""
        found.append(f"compiled again {facts.num_recompiles:.0f} times{shapes}")
    title = "sizes that are no multiple of 8" if odd_s else "shapes that keep changing"
    title += " cost {} of the time" if lost_s else " cost time"
    saved = (0.0, 1.0, (odd_s + compiled_s) / lost_s) if lost_s else None
    return e.finding(rule, title, lost_s, found, saved=saved)


# The device and the run


def queued_idle(e: Evidence, rule: Rule) -> Finding | None:
    """A device that idles although work is queued."""
    idle_s = e.seconds_or_zero("queued_idle")
    found = (f"{seconds(idle_s / e.num_steps)} of every step pass between two kernels that were both launched",)
    title = "the device stands idle for {} of the time with work in its queue"
    return e.finding(rule, title, idle_s, found, saved=None)


MIN_FALL = 0.07
"""Seven percent: clocks of a warm GPU settle two or three percent lower than those of a cold one."""
MIN_STEPS = 50
"""Ten steps in each fifth, so that a median means something."""
MIN_LENGTH_S, MIN_SEEN_S = 900.0, 120.0
"""A quarter of an hour: before, caches, clocks and other people's jobs explain every drift. Two minutes where the
monitor itself saw the MFU fall and stay down: a loop of milliseconds that ends its first rollout falls, too."""
MAX_WAIT = 0.99
"""Share of a step that may have been spent on waiting for data."""
MIN_SIGMAS = 2.0
"""The fall in units of the usual distance of a step from its median."""


def slow_sag(e: Evidence, rule: Rule) -> Finding | None:
    """A fall of computing speed over the run."""
    regimes = e.window.events("regime")
    if e.wall_s < (MIN_SEEN_S if regimes else MIN_LENGTH_S):
        raise NotCheckedError(f"the run is shorter than {MIN_LENGTH_S / 60:.0f} minutes")
    if (e.cpu_share or 1.0) < STARVED:
        raise NotCheckedError("the process was kept from its core, more at one time than at another")
    mfu, waits = map(e.window.values, ("perf/mfu", "perf/data_wait_share"))
    if sound(waits, MAX_WAIT) is not waits:  # an unknown wait is none; one that leaves too little cannot be judged by
        waits = array("d", (0.0 if math.isnan(wait) else wait if 0 <= wait < MAX_WAIT else math.nan for wait in waits))
    speed = sound(array("d", map(operator.truediv, mfu, map(operator.sub, repeat(1.0), waits))), math.inf)
    if len(speed) < MIN_STEPS:
        raise NotCheckedError(f"{len(speed)} ordinary steps have an MFU, and it takes {MIN_STEPS} to tell")
    fifth = len(speed) // 5
    first, middle, last = (median(speed[at : at + fifth]) for at in (0, 2 * fifth, len(speed) - fifth))
    spread = median(abs(value - first) for value in speed[:fifth])
    fall = 1 - last / first if first > 0 else 0.0
    if fall < MIN_FALL or first - last < MIN_SIGMAS * spread or not last <= middle <= first:
        return None
    slow_s = math.fsum(max(1 - value / first, 0.0) for value in speed) / len(speed) * e.wall_s
    places = ("the first fifth", "the middle", "the last")
    speeds = [f"{utilisation(value)} in {place}" for value, place in zip((first, middle, last), places, strict=True)]
    found = [f"MFU while computing: {', '.join(speeds)}"]
    found += [f"the monitor saw it fall at step {str(event.get('since_step'))[:20]}" for event in regimes[-3:]]
    return e.finding(rule, f"computing has become {percent(fall)} slower since the run began", slow_s, found)


MIN_CLOCKS = 6
"""Samples of the clock: a minute of them."""
BUSY = 0.5
"""Utilisation from which on a sample is of a GPU that works: one that rests lowers its clock by itself."""


def clock_fall(e: Evidence, rule: Rule) -> Finding | None:
    """A GPU that runs at a lower clock than it did."""
    if not e.is_gpu:
        return None
    samples = [mapping(event.get("metrics")) for event in e.window.events("resources")]
    keys = ("clock_hz", "utilisation", "throttle_reasons", "temperature_c")
    rows = [[number_or_nan(sample.get(f"resource/gpu_{key}"), MAX_COUNT) for key in keys] for sample in samples]
    rows = [row for row in rows if row[0] > 0 and not row[1] < BUSY]
    if len(rows) < MIN_CLOCKS:
        raise NotCheckedError(f"the clock of the busy GPU was sampled {len(rows)} times, and it takes {MIN_CLOCKS}")
    best, usual = max(row[0] for row in rows), median(row[0] for row in rows[len(rows) // 3 :])
    fall = 1 - usual / best
    held = [reason for row in rows if row[0] < best and row[2] > 0 for reason in throttling(row[2])]
    why = ", ".join(f"{name} in {held.count(name)} of {len(rows)} samples" for name in dict.fromkeys(held))
    hottest = max(known((row[3] for row in rows), MAX_COUNT), default=math.nan)
    found = [f"the clock fell from {best / 1e6:.0f} to {usual / 1e6:.0f} MHz, the median of the last two thirds"]
    found += [f"held down by {why}"] if why else ["the driver names no reason"]
    found += [f"at most {hottest:.0f} degrees Celsius"] if hottest > 0 else []
    # Kernels that wait for memory do not slow down with the clock: half of the loss is sure to be more than it costs.
    lost_s = fall * e.seconds_or_zero(*_WORK)
    title = f"the GPU's clock fell by {percent(fall)}, which costs {{}} of the time"
    return e.finding(rule, title, lost_s, found, saved=(0.0, 0.5, 1.0)) if fall >= MIN_CLOCK_FALL else None


MIN_CLOCK_FALL = 0.05
"""A twentieth: clocks of a busy card move by two or three percent."""
MOST_MFU = 1.0


def impossible_mfu(e: Evidence, rule: Rule) -> Finding | None:
    """A utilisation above the peak."""
    mfu = highest = e.mean("perf/mfu")
    if e.window.amount("perf/hfu"):
        highest = max(mfu, e.mean("perf/hfu"))
    if highest <= MOST_MFU:
        return None
    dtype, peak = list(e.run.peaks.items())[-1] if e.run.peaks else ("", {})
    flop_per_s = number_or_nan(peak.get("flop_per_s"), MAX_COUNT * MAX_COUNT)
    found = [f"MFU {percent(mfu)} over the ordinary steps", "which peak was used is not in the record"]
    if flop_per_s > 0:
        found[1] = f"peak: {rate(flop_per_s)} {dtype[:20]}, {str(peak.get('source'))[:20]}"
    title = f"a utilisation of {percent(highest)} is impossible: the peak, the dtype or the FLOPs are wrong"
    return e.finding(rule, title, 0.0, found, saved=None, is_doubt=True)


# When the others have spoken


def undetermined(e: Evidence, rule: Rule) -> Finding | None:
    """A run of which most is untold, with the parts that are known."""
    if not e.is_untold and not e.is_left_to_chance:
        return None
    reason = e.why_untold[0]
    parts = sorted((part for part in e.waterfall.parts if part.share >= 0.01), key=lambda part: -part.share)
    found = [f"{part.label.lower()}: {percent(part.share)} of the time" for part in parts[:4]]
    title = f"where the time went is undetermined: {reason}"
    if not e.is_untold:
        title = f"what the operators spend is undetermined: {reason}"
    elif e.untold_s < 0.95 * e.wall_s and e.has_steps and e.sampled:
        title = f"where {e.percent(e.untold_s)} of the time went is undetermined: {reason}"
    return e.finding(rule, title, 0.0, found, saved=None)


def healthy(e: Evidence, rule: Rule) -> Finding | None:
    """Nothing stands out: the largest parts, and what helps against the first."""
    if e.is_untold or e.is_left_to_chance:
        return None
    losses = [part for part in e.waterfall.parts if part.name != "ideal"]
    largest = sorted(losses, key=lambda part: -part.share)[:2]
    found = [f"{part.label.lower()}: {percent(part.share)} of the time" for part in largest]
    if speed := matmul_speed(e):
        found.append(f"matmuls run at {speed} of the peak while they run")
    return e.finding(rule, "no known cause of lost time stands out", 0.0, found, saved=None)


def matmul_speed(e: Evidence) -> str:
    """How near matmuls come to the peak while they run; empty where that is not known."""
    ideal_s = e.seconds_or_zero("ideal")
    matmul_s = e.seconds_or_zero(*MATMULS)
    return percent(ideal_s / matmul_s) if e.sampled and ideal_s > 0 and matmul_s > 0 else ""


_WORK = (*MATMULS, "recompute", "non_matmul")
_STRETCHED = ("no_grad", "generation", "optimizer", "launch_gaps", "data_wait", "own_code", "unexplained", *_WORK[2:])
_WANTED = 0.15
_STARTING = ("launch_gaps", "non_matmul", "matmul_below_peak", "optimizer")
_IN_FORMAT = (*_WORK, "optimizer", "own_code", "unexplained")
_RULES = (
    # Half of a percent to a twentieth is what a sound loop spends: below the threshold there is nothing to win.
    Rule(name="checkpoint_pause", look=pauses, parts=("pauses",), threshold=0.03),
    Rule(name="clock_fall", look=clock_fall, parts=_WORK, threshold=0.02, explains=("slow_sag",)),
    Rule(name="cpu_contention", look=cpu_contention, parts=_STRETCHED, threshold=0.1, is_circumstance=True),
    Rule(name="cpu_preprocessing", look=data_wait, parts=("data_wait",), threshold=0.05, leads_from=_WANTED),
    Rule(name="data_stall", look=data_wait, parts=("data_wait",), threshold=0.05),
    # Reading and writing the scores is what the memory is busy with.
    Rule(name="eager_attention", look=eager_attention, parts=_WORK, threshold=0.03, explains=("memory_bound",)),
    Rule(name="eval_pause", look=pauses, parts=("pauses",), threshold=0.1, leads_from=_WANTED),
    Rule(name="exposed_communication", look=exposed_communication, parts=("exposed_communication",), threshold=0.05),
    # Numbers that are twice as long take twice as long to move.
    Rule(name="fp32_matmul", look=fp32_matmul, parts=_IN_FORMAT, explains=("memory_bound",)),
    Rule(name="gc_pause", look=gc_pause, parts=("pauses",), threshold=0.03),
    Rule(name="healthy", look=healthy, is_last_resort=True),
    Rule(name="host_sync", look=host_sync, parts=("launch_gaps", "non_matmul", "own_code"), threshold=0.02),
    Rule(name="impossible_mfu", look=impossible_mfu),
    # Operators that are too small spend their time on being started.
    Rule(name="kernel_launch", look=kernel_launch, parts=_STARTING, threshold=SURELY_FIXED, explains=("memory_bound",)),
    Rule(name="memory_bound", look=memory_bound, parts=("non_matmul",), threshold=SURELY_MOVED),
    Rule(name="optimizer_heavy", look=optimizer_heavy, parts=("optimizer",), leads_from=_WANTED),
    Rule(name="own_code", look=own_code, parts=("own_code",), threshold=0.1, leads_from=_WANTED),
    Rule(name="padding_waste", look=padding_waste, parts=(*_WORK, "unexplained"), leads_from=_WANTED),
    Rule(name="queued_idle", look=queued_idle, parts=("queued_idle",), threshold=0.1),
    Rule(name="ragged_shapes", look=ragged_shapes, parts=("matmul_below_peak", "pauses")),
    Rule(name="recompute", look=recompute, parts=("recompute",), threshold=0.05),
    Rule(name="side_passes", look=side_passes, parts=("no_grad", "generation"), threshold=0.1, leads_from=_WANTED),
    Rule(name="slow_sag", look=slow_sag),
    # The others' wait, and their fall since it began.
    Rule(name="straggler", look=straggler, threshold=0.03, explains=("exposed_communication", "slow_sag")),
    Rule(name="undetermined", look=undetermined, is_last_resort=True),
)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in _RULES}
"""Every rule by its name."""
