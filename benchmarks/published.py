"""Do our conventions give back the MFU that papers and repositories have printed?

    python benchmarks/published.py --table published_mfu.csv [--record benchmarks/results/published.json]

The table is a CSV with a row for each published run. It is not part of this repository.
Each row of the table is recomputed from its sizes, throughput and GPUs under the convention that its own
`attention_convention` field states, with the peak that its source divides by. `READINGS` is that translation, written
down by source and wording; nothing looks at the published figure to choose. Compared are MFU and HFU where they are
printed, else TFLOP/s. This proves transcription and arithmetic, not that a paper's FLOP model is right.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from flopmeter.conventions import CONVENTIONS, Architecture, Recompute
from outcome import add_record_option, finish

BENCHMARK_VERSION = 1
TOLERANCE = 0.005
MAX_DISAGREEING_SHARE = 0.05

Row = Mapping[str, str]
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the rows of one source with one wording are read."""

    source: str
    """How the row's `source` begins."""
    states: str
    """The row's `attention_convention`, word for word."""
    convention: str
    basis: str
    """Who says that this is the convention."""
    is_inferred: bool = False
    """The source does not say it: whoever wrote the table found the wording by what reproduces the figures."""
    peaks: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """FLOP/s that the source divides by, by the row's gpu and dtype; empty where only TFLOP/s are compared."""
    recompute: Mapping[str, Recompute] = field(default_factory=dict)
    """Meaning of `activation_checkpointing` for HFU; a wording that is absent leaves HFU uncompared."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What the source says about the model outside of the table's columns."""
    uses_params: bool = False
    """The convention's N is the row's `params`."""


def _deepseek_v3_weights() -> int:
    """Matmul weights that a token meets in DeepSeek-V3, without the MTP module.

    Sizes as remembered from its public config; only the widths of keys (192) and values (128) stand in the references.
    """
    hidden, heads, nope, rope, value = 7168, 128, 128, 64, 128
    query = hidden * 1536 + 1536 * heads * (nope + rope)
    key_value = hidden * (512 + rope) + 512 * heads * (nope + value)
    attention = query + key_value + heads * value * hidden
    moe_mlp = (8 + 1) * 3 * hidden * 2048 + 256 * hidden
    return 61 * attention + 3 * (3 * hidden * 18432) + 58 * moe_mlp + 129280 * hidden


_A100 = {("A100-SXM-80GB", "fp16"): 312e12, ("A100-SXM-80GB", "bf16"): 312e12}
_COMPOSER = {**_A100, ("H100-SXM-80GB", "bf16"): 989.5e12, ("H100-SXM-80GB", "fp8"): 1979e12}
_PALM = {**_A100, ("TPU v4", "bf16"): 275e12, ("TPU v3", "bf16"): 123e12}
_H800 = {("H800-SXM", "fp8 train, MFU vs bf16 989"): 989e12}
# Keys are 128 + 64 channels wide and values 128: attention costs what 160-channel heads would.
_DEEPSEEK = {"head_dim": 160, "matmul_params": _deepseek_v3_weights()}
_SELECTIVE: Mapping[str, Recompute] = {"selective + sequence parallel": "selective"}

READINGS = (
    Reading(
        source="mosaicml/llm-foundry",
        states="full (12*L*d*s per token), 6*N_total incl. embeddings; HFU=4/3*MFU when checkpointing",
        convention="palm",
        basis="the source spells the formula out; peaks are composer's table",
        peaks=_COMPOSER,
        recompute={"none": "none", "full": "full"},
        uses_params=True,
    ),
    Reading(
        source="NVIDIA-NeMo/Megatron-Bridge",
        states="causal-halved (inferred: 6*P_matmul + 6*L*h*s reproduces tokens/s->TFLOP/s)",
        convention="6p_causal",
        basis="inferred by the table's authors; the counter in Megatron-LM's training.py halves attention too",
        is_inferred=True,
    ),
    Reading(
        source="NVIDIA/Megatron-LM",
        states="full; eq.(3) F=96*B*s*l*h^2*(1+s/6h+V/16lh) counts the recompute pass, so the percentage is HFU-like, "
        "not MFU",
        convention="gpt",
        basis="the source spells the formula out",
        peaks=_A100,
        recompute={"full (counted)": "full"},
    ),
    Reading(
        source="arXiv:2205.05198",
        states="full; model FLOPs 72*B*L*s*h^2*(1+s/6h+v/12hL); hardware/model ~ 1+s/6h",
        convention="gpt",
        basis="MFU by the row's formula, batch as the table has it; HFU by 1 + s/3h + v/12hL, not by the row's own "
        "approximation 1 + s/6h, which is 0.6 % off for 22B; that formula is from memory, the paper was not read here",
        peaks=_A100,
        recompute=_SELECTIVE,
    ),
    Reading(
        source="arXiv:2205.05198",
        states="full",
        convention="gpt",
        basis="the same paper's formula",
        peaks=_A100,
        recompute=_SELECTIVE,
    ),
    Reading(
        source="arXiv:2204.02311 sec 4.1",
        states="full: 6N+12*L*H*Q*T",
        convention="palm",
        basis="the source spells the formula out; its HFU of 57.8 rests on a rematerialisation not itemised",
        peaks=_PALM,
        sizes={"head_dim": 256},
        uses_params=True,
    ),
    Reading(
        source="arXiv:2204.02311 Table 3",
        states="full",
        convention="palm",
        basis="the same paper's formula, applied by its authors to other models",
        peaks=_PALM,
        uses_params=True,
    ),
    Reading(
        source="arXiv:2505.09343",
        states="full (non-causal)",
        convention="6p_full",
        basis="the source names it; sizes of MLA and experts from the model's public config",
        peaks=_H800,
        sizes=_DEEPSEEK,
    ),
    Reading(
        source="arXiv:2505.09343",
        states="causal-halved",
        convention="6p_causal",
        basis="the source names it; sizes of MLA and experts from the model's public config",
        peaks=_H800,
        sizes=_DEEPSEEK,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one row."""

    line: int
    """In the table, the header being line 1."""
    row: Row
    obstacle: str = ""
    """Why nothing could be compared."""
    reading: Reading | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    """By figure: "mfu" and "hfu" as fractions, "flop_per_s" of one GPU."""
    ours: Mapping[str, float] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Repository or paper, without commit and page."""
        return self.row["source"].partition("@")[0].split()[0]

    @property
    def convention(self) -> str:
        """The name of the rule that was applied."""
        return self.reading.convention if self.reading else ""

    @property
    def error(self) -> float:
        """The worst relative difference among the row's figures."""
        return max((self.ours[figure] / self.published[figure] - 1 for figure in self.ours), key=abs, default=0.0)

    def agrees(self, tolerance: float = TOLERANCE) -> bool:
        """Recomputed, and close enough."""
        return not self.obstacle and abs(self.error) <= tolerance

    @property
    def reason(self) -> str:
        """Why we differ, where the row itself shows it; empty: not known."""
        tokens_per_s, seq = _tokens_per_s(self.row), int(self.row["seq_len"])
        slack = seq / 2 / tokens_per_s if tokens_per_s and tokens_per_s % seq == 0 else 0.0
        if abs(self.error) > slack:
            return ""
        return f"tokens/s is printed in whole sequences a second, so it is known to +-{slack:.1%} only"

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        facts = {key: self.row[key] for key in ("source", "model", "gpu", "dtype", "tokens_per_s_total")}
        figures = {"convention": self.convention, "published": self.published, "ours": self.ours}
        return {"line": self.line, **facts, **figures, "error": round(self.error, 5), "reason": self.reason}


def find_reading(source: str, states: str) -> Reading | None:
    """The reading of a row, from its source and its own words alone."""
    matches = [reading for reading in READINGS if source.startswith(reading.source) and states == reading.states]
    return matches[0] if matches else None


def judge(line: int, row: Row) -> Verdict:
    """Recompute one row, or say what is missing."""
    reading = find_reading(row["source"], row["attention_convention"])
    if not all(row[size] for size in _SIZES):
        return Verdict(line=line, row=row, obstacle="sizes not in the table (experts, hybrids, fine-tuning)")
    if not row["gpus"] or not _tokens_per_s(row):
        return Verdict(line=line, row=row, obstacle="no throughput published")
    if reading is None:
        return Verdict(line=line, row=row, obstacle="no convention stated")
    published = _read_figures(row, reading)
    if not published:
        return Verdict(line=line, row=row, obstacle="no MFU, HFU or TFLOP/s published")
    ours = {figure: _recompute(row, reading, figure) for figure in published}
    return Verdict(line=line, row=row, reading=reading, published=published, ours=ours)


def _read_figures(row: Row, reading: Reading) -> dict[str, float]:
    figures = {}
    if row["reported_mfu"]:
        figures["mfu"] = float(row["reported_mfu"]) / 100
    if row["reported_hfu"] and row["activation_checkpointing"] in reading.recompute:
        figures["hfu"] = float(row["reported_hfu"]) / 100
    if not figures and row["tflops_per_gpu"]:
        figures["flop_per_s"] = float(row["tflops_per_gpu"]) * 1e12
    return figures


def _recompute(row: Row, reading: Reading, figure: str) -> float:
    sizes: dict[str, Any] = {size: int(row[size]) for size in _SIZES} | dict(reading.sizes)
    arch = Architecture(**sizes, params=int(row["params"]) if reading.uses_params else 0)
    recompute = reading.recompute[row["activation_checkpointing"]] if figure == "hfu" else "none"
    flop = CONVENTIONS[reading.convention].hardware_flop_per_token(arch, int(row["seq_len"]), recompute)
    flop_per_s = flop * _tokens_per_s(row) / int(row["gpus"])
    return flop_per_s if figure == "flop_per_s" else flop_per_s / reading.peaks[row["gpu"], row["dtype"]]


def _tokens_per_s(row: Row) -> float:
    if row["tokens_per_s_total"]:
        return float(row["tokens_per_s_total"])
    if row["step_time_s"] and row["global_batch_seqs"]:
        return int(row["global_batch_seqs"]) * int(row["seq_len"]) / float(row["step_time_s"])
    return 0.0


def check_percentage(row: Row) -> bool | None:
    """Whether TFLOP/s over the peak rounds to the printed percentage, where no throughput lets us do more."""
    reading = find_reading(row["source"], row["attention_convention"])
    if reading is None or _tokens_per_s(row) or not (row["tflops_per_gpu"] and row["reported_hfu"]):
        return None
    share = float(row["tflops_per_gpu"]) * 1e12 / reading.peaks[row["gpu"], row["dtype"]]
    return round(100 * share) == float(row["reported_hfu"])


def judge_table(path: Path) -> list[Verdict]:
    """A verdict on every row, in the table's order."""
    with path.open(newline="", encoding="utf-8") as file:
        return [judge(line, row) for line, row in enumerate(csv.DictReader(file), start=2)]


def count(verdicts: list[Verdict]) -> dict[str, Any]:
    """How many of these rows could be recomputed, and how well."""
    recomputed = [verdict for verdict in verdicts if not verdict.obstacle]
    return {
        "rows": len(verdicts),
        "recomputable": len(recomputed),
        "within_0.5_percent": sum(verdict.agrees() for verdict in recomputed),
        "within_1_percent": sum(verdict.agrees(0.01) for verdict in recomputed),
        "worst_error": round(max(abs(verdict.error) for verdict in recomputed), 5) if recomputed else None,
    }


def summarise(verdicts: list[Verdict]) -> dict[str, Any]:
    """What the last line of the benchmark holds."""
    total = count(verdicts)
    disagreeing = find_disagreeing(verdicts)
    ratios = [outcome for verdict in verdicts if (outcome := check_percentage(verdict.row)) is not None]
    return {
        **total,
        "disagreeing": len(disagreeing),
        "disagreeing_share": round(len(disagreeing) / max(total["recomputable"], 1), 4),
        "unexplained": sum(not verdict.reason for verdict in disagreeing),
        "convention_inferred_by_the_table": sum(bool(v.reading and v.reading.is_inferred) for v in verdicts),
        "not_recomputable": dict(Counter(verdict.obstacle for verdict in verdicts if verdict.obstacle)),
        "percentage_only": {"rows": len(ratios), "agree": sum(ratios)},
        "by_source": {
            source: count([verdict for verdict in verdicts if verdict.source == source])
            for source in dict.fromkeys(verdict.source for verdict in verdicts)
        },
    }


def find_disagreeing(verdicts: list[Verdict]) -> list[Verdict]:
    """The rows that were recomputed and came out different."""
    return [verdict for verdict in verdicts if not (verdict.obstacle or verdict.agrees())]


def _print_sources(summary: Mapping[str, Any]) -> None:
    table = Table(Column("source", no_wrap=True), title="Published figures, recomputed")
    for heading in ("rows", "recomputed", "in 0.5 %", "in 1 %", "worst"):
        table.add_column(heading, justify="right")
    for source, counts in summary["by_source"].items():
        *numbers, worst = counts.values()
        table.add_row(source, *map(str, numbers), "-" if worst is None else f"{worst:.2%}")
    Console().print(table)


def _print_rest(verdicts: list[Verdict], summary: Mapping[str, Any]) -> None:
    for verdict in find_disagreeing(verdicts):
        row = verdict.row
        what = f"line {verdict.line}: {row['source'][-10:]} {row['model']} {row['gpu']} {row['dtype']}"
        print(f"disagrees {verdict.error:+.2%}, {what}: {verdict.reason or 'UNEXPLAINED'}")
    for obstacle, num_rows in summary["not_recomputable"].items():
        print(f"not recomputable, {num_rows} rows: {obstacle}")
    inferred = summary["convention_inferred_by_the_table"]
    print(f"convention stated by the source in {summary['recomputable'] - inferred} rows, by the table in {inferred}")
    only = summary["percentage_only"]
    print(
        f"without throughput, TFLOP/s over the peak gives the printed figure in {only['agree']} of {only['rows']} rows"
    )


def _details(table: Path, verdicts: list[Verdict], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the file on record holds beside the summary."""
    return {
        "table_sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
        "disagreeing_rows": [verdict.as_dict() for verdict in find_disagreeing(verdicts)],
        "lines_not_recomputable": {
            obstacle: " ".join(str(verdict.line) for verdict in verdicts if verdict.obstacle == obstacle)
            for obstacle in summary["not_recomputable"]
        },
        "readings": [{key: getattr(r, key) for key in ("source", "states", "convention", "basis")} for r in READINGS],
    }


def main() -> int:
    """Print the comparison; exit code 1 when more rows disagree than may, or one does for no known reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--table", type=Path, help="CSV of published runs, which is not part of this repository")
    add_record_option(parser)
    arguments = parser.parse_args()
    if arguments.table is None or not arguments.table.is_file():
        told = "needs a table" if arguments.table is None else f"{arguments.table} is no file"
        print(f"published.py: {told}: name a CSV of published runs with --table", file=sys.stderr)
        return 2
    verdicts = judge_table(arguments.table)
    summary = summarise(verdicts)
    _print_sources(summary)
    _print_rest(verdicts, summary)
    details = _details(arguments.table, verdicts, summary)
    finish("published", BENCHMARK_VERSION, {**summary, **details}, arguments.record)
    return int(summary["disagreeing_share"] > MAX_DISAGREEING_SHARE or summary["unexplained"] > 0)


if __name__ == "__main__":
    sys.exit(main())
