"""Run files in which every second is planned, so that tests can say by hand where it must turn up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flopmeter.record import Run, RunWriter, load_run

Line = dict[str, Any]
START_S = 1_000_000.0


def event(kind: str, time_s: float | None = None, **fields: Any) -> Line:
    line = {"kind": "event", "event": kind, "after_step": 0, **fields}
    return line if time_s is None else line | {"time": time_s}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds of one ordinary step, and what surrounds the steps. A healthy run of 40 steps of 100 ms at 50 % MFU."""

    num_steps: int = 40
    ideal_s: float | None = 0.050
    matmul_s: float = 0.070
    recompute_s: float = 0.0
    non_matmul_s: float = 0.020
    gap_s: float = 0.004
    optimizer_s: float = 0.005
    exposed_s: float | None = None
    data_wait_s: float = 0.001
    host_to_device_s: float = 0.0
    other_s: float = 0.0
    processed: float = 1.0
    """MFU with padding over MFU without."""
    metrics: Line = field(default_factory=dict)
    """More metrics of every step."""
    sampling_s: float = 0.0
    """What sampling adds to the gaps of a sampled step."""
    waited_s: float | None = None
    """For how long the thread had no core in a sampled step."""
    num_profiles: int = 1
    device: str = "cpu"
    """Of the profile."""
    top: tuple[tuple[str, float, int], ...] = ()
    num_ops: int = 500
    facts: Line | None = field(default_factory=dict)
    """More facts; None: no step was observed."""
    header: Line = field(default_factory=dict)
    events: tuple[Line, ...] = ()
    pauses: tuple[tuple[str, float], ...] = ()
    """Between the two middle steps."""

    @property
    def computing_s(self) -> float:
        return self.matmul_s + self.recompute_s + self.non_matmul_s + self.gap_s

    @property
    def step_s(self) -> float:
        beside = self.optimizer_s + (self.exposed_s or 0.0) + self.data_wait_s + self.host_to_device_s + self.other_s
        return self.computing_s + beside

    def lines(self) -> list[Line]:
        now_s = START_S
        lines: list[Line] = [{"kind": "header", "schema": 2, "started_at": now_s, "device": "cpu", **self.header}]
        for number in range(1, self.num_steps + 1):
            if number == self.num_steps // 2 + 1:
                for name, seconds in self.pauses:
                    now_s += seconds
                    lines.append(event("pause", now_s, name=name, duration_s=seconds))
            now_s += self.step_s
            lines.append({"kind": "step", "step": number, "time": now_s, "metrics": self.step_metrics()})
        lines += [self.profile(now_s) for _ in range(self.num_profiles)]
        if self.facts is not None:
            usual = {"num_ops": 500, "num_optimizer_ops": 1, "num_parameter_tensors": 10, "host_syncs": {}}
            usual |= {"optimizer": "fused", "matmul_dtypes": {"float32": 1e9}, "is_compiled": False, "odd_sizes": []}
            lines.append(event("facts", now_s, **usual | self.facts))
        return [*lines, *self.events]

    def step_metrics(self) -> Line:
        shares = {
            "data_wait": self.data_wait_s,
            "host_to_device": self.host_to_device_s,
            "forward": self.computing_s / 3,
            "backward": self.computing_s * 2 / 3 + (self.exposed_s or 0.0),
            "optimizer": self.optimizer_s,
            "other": self.other_s,
        }
        metrics: Line = {"perf/step_time": self.step_s, "perf/model_flop": 1e9}
        metrics |= {f"perf/{phase}_share": seconds / self.step_s for phase, seconds in shares.items()}
        if self.exposed_s is not None:
            metrics["perf/exposed_communication_share"] = self.exposed_s / self.step_s
        if self.ideal_s is not None:
            mfu = self.ideal_s / self.step_s
            metrics |= {"perf/mfu": mfu, "perf/hfu": mfu, "perf/mfu_processed": mfu * self.processed}
        return metrics | self.metrics

    def profile(self, time_s: float) -> Line:
        return event(
            "profile",
            time_s,
            device=self.device,
            step_s=self.step_s + self.sampling_s,
            typical_step_s=self.step_s,
            matmul_s=self.matmul_s,
            recompute_s=self.recompute_s,
            non_matmul_s=self.non_matmul_s,
            optimizer_s=self.optimizer_s,
            communication_s=self.exposed_s or 0.0,
            copy_s=self.host_to_device_s,
            gap_s=self.gap_s + self.sampling_s,
            waited_s=self.waited_s,
            num_ops=self.num_ops,
            top=[list(row) for row in self.top],
        )

    def run(self, folder: Path) -> Run:
        return record(folder, self.lines())

    def but(self, **changes: Any) -> Plan:
        return replace(self, **changes)


def record(folder: Path, lines: list[Line]) -> Run:
    """Written as a monitor writes it, and read back."""
    path = folder / "run.jsonl"
    path.unlink(missing_ok=True)
    writer = RunWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return load_run(path)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -1, 0]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.lists(st.floats(), max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=5), st.floats(), max_size=2),
)
KEYS = st.sampled_from([*Plan().step_metrics(), "perf/exposed_communication_share", "perf/data_wait_cpu_share"])
EVENT_KEYS = st.sampled_from(
    [
        *Plan().profile(0.0),
        "duration_s",
        "longest_s",
        "name",
        "num_steps",
        "device_s",
        "data_wait",
        "metrics",
        "extra_s",
    ]
)
STEPS = st.fixed_dictionaries(
    {
        "kind": st.just("step"),
        "step": st.integers(-5, 1000),
        "time": HOSTILE,
        "metrics": st.dictionaries(KEYS, HOSTILE, max_size=8),
    },
    optional={"marks": HOSTILE},
)
EVENTS = st.dictionaries(EVENT_KEYS, HOSTILE, max_size=8).flatmap(
    lambda fields: st.sampled_from(["profile", "pause", "gc", "device_time", "resources", "facts", "regime"]).map(
        lambda name: {**fields, "kind": "event", "event": name}
    )
)
