"""How busy were the GPU's pipes, as the command `dcgmi dmon` prints it?

Needs DCGM's host engine on this machine, running as root. One reading takes about a second: the first row after a
watch begins is blank, and GPUs before Hopper measure a few fields at a time in turn (both seen in NVIDIA/DCGM#244),
so a handful of rows is averaged, field by field. Left out: MIG slices, whose rows are wrong where slices of different
sizes share a GPU (NVIDIA/DCGM#248).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from statistics import fmean

from flopmeter.flops.counters import CounterReader, CounterUnavailableError, Reading, Target, parse_share

DEVICE_TYPE = "cuda"
ORDER = 30

FIELDS = {
    1002: "sm_active",
    1003: "sm_occupancy",
    1004: "tensor_active",
    1005: "dram_active",
    1006: "fp64_active",
    1007: "fp32_active",
    1008: "fp16_active",
}
DELAY_MS = 100
NUM_ROWS = 11
TIMEOUT_S = 10.0


def open(target: Target) -> CounterReader:
    program = shutil.which("dcgmi")
    if program is None:
        raise CounterUnavailableError("no dcgmi in PATH")
    if target.uuid is None:
        raise CounterUnavailableError("the GPU's UUID is not known")
    if target.mig_instance is not None:
        raise CounterUnavailableError("dcgmi's rows are not reliable for MIG slices")
    gpu_ids = parse_discovery(run_dcgmi(program, "discovery", "-l"))
    if target.uuid not in gpu_ids:
        raise CounterUnavailableError(f"dcgmi does not list {target.uuid}")
    reader = DcgmiReader(program, gpu_ids[target.uuid])
    reader.read()
    return reader


class DcgmiReader:
    """Shares over the second that a reading takes."""

    name = "dcgmi"

    def __init__(self, program: str, gpu_id: int) -> None:
        self._gpu_id = gpu_id
        fields = ",".join(str(field) for field in FIELDS)
        self._command = (program, "dmon", "-e", fields, "-i", str(gpu_id), "-d", str(DELAY_MS), "-c", str(NUM_ROWS))

    def start(self) -> None:
        """Nothing to mark: each reading watches anew."""

    def read(self) -> Reading:
        values = parse_dmon(run_dcgmi(*self._command), self._gpu_id)
        if all(value is None for value in values.values()):
            raise CounterUnavailableError("dcgmi prints only N/A for this GPU")
        return Reading(**values, interval_s=(NUM_ROWS - 1) * DELAY_MS / 1000, note="about a second out of the interval")

    def close(self) -> None:
        """Nothing is held between readings."""


def parse_discovery(text: str) -> dict[str, int]:
    """UUID -> DCGM's GPU number, from the table of `dcgmi discovery -l`."""
    gpu_ids: dict[str, int] = {}
    gpu_id = None
    for cells in (line.split("|") for line in text.splitlines()):
        if len(cells) < 3:
            continue
        gpu_id = int(cells[1]) if cells[1].strip().isdecimal() else gpu_id
        uuid = re.search(r"Device UUID:\s*(\S+)", cells[2])
        if uuid and gpu_id is not None:
            gpu_ids[uuid[1]] = gpu_id
    return gpu_ids


def parse_dmon(text: str, gpu_id: int) -> dict[str, float | None]:
    """The mean of each column over the GPU's rows; None for a column that never held a share."""
    rows = [row[1].split() for row in re.finditer(rf"^GPU\s+{gpu_id}\s+(.*)$", text, re.MULTILINE)]
    columns: dict[str, list[float]] = {name: [] for name in FIELDS.values()}
    for row in (row for row in rows if len(row) == len(FIELDS)):
        for name, cell in zip(FIELDS.values(), row, strict=True):
            if (share := parse_share(cell)) is not None:
                columns[name].append(share)
    return {name: fmean(shares) if shares else None for name, shares in columns.items()}


def run_dcgmi(*command: str, timeout_s: float = TIMEOUT_S) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired as error:
        raise CounterUnavailableError(f"dcgmi did not answer within {timeout_s} s") from error
    except OSError as error:
        raise CounterUnavailableError(f"dcgmi does not start ({error.strerror})") from error
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        complaint = (text + done.stderr.decode(errors="replace")).strip().splitlines()
        raise CounterUnavailableError(f"dcgmi failed: {complaint[-1].strip() if complaint else done.returncode}")
    return text
