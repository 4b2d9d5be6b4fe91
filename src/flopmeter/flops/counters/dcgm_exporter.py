"""How busy were the GPU's pipes, as a dcgm-exporter on this machine publishes it?

Reads the exporter's Prometheus text from http://127.0.0.1:9400/metrics, or from the address in
FLOPMETER_DCGM_EXPORTER. The exporter needs SYS_ADMIN for the DCGM_FI_PROF_* fields; its reader needs nothing.
Left out: fields that the exporter's counter file does not enable (by default only tensor and memory activity are).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from time import monotonic
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from flopmeter.flops.counters import CounterReader, CounterUnavailableError, Reading, Target, parse_share

DEVICE_TYPE = "cuda"
ORDER = 20

ADDRESS_VARIABLE = "FLOPMETER_DCGM_EXPORTER"
DEFAULT_ADDRESS = "http://127.0.0.1:9400/metrics"
TIMEOUT_S = 2.0
MAX_BYTES = 8 * 2**20

# After "DCGM_FI_PROF_"; DCGM 4 renamed the fields and exporters of both kinds are in use.
FIELDS = {
    "SM_ACTIVE": "sm_active",
    "SM_UTIL_RATIO": "sm_active",
    "SM_OCCUPANCY": "sm_occupancy",
    "SM_OCCUPANCY_RATIO": "sm_occupancy",
    "PIPE_TENSOR_ACTIVE": "tensor_active",
    "TENSOR_UTIL_RATIO": "tensor_active",
    "DRAM_ACTIVE": "dram_active",
    "DRAM_UTIL_RATIO": "dram_active",
    "PIPE_FP64_ACTIVE": "fp64_active",
    "FP64_UTIL_RATIO": "fp64_active",
    "PIPE_FP32_ACTIVE": "fp32_active",
    "FP32_UTIL_RATIO": "fp32_active",
    "PIPE_FP16_ACTIVE": "fp16_active",
    "FP16_UTIL_RATIO": "fp16_active",
}
_LINE = re.compile(r"DCGM_FI_PROF_(\w+)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def open(target: Target) -> CounterReader:
    address = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
    if not address.startswith(("http://", "https://")):
        raise CounterUnavailableError(f"{ADDRESS_VARIABLE} is {address!r}, which is no http address")
    if target.uuid is None:
        raise CounterUnavailableError("the GPU's UUID is not known")
    reader = DcgmExporterReader(address, target)
    reader.read()
    return reader


class DcgmExporterReader:
    """Shares as of the exporter's last collection."""

    name = "dcgm_exporter"

    def __init__(self, address: str, target: Target) -> None:
        self._address = address
        self._target = target

    def start(self) -> None:
        """Nothing to mark: the exporter samples by its own clock."""

    def read(self) -> Reading:
        return find_reading(fetch(self._address), self._target)

    def close(self) -> None:
        """Nothing is held between readings."""


def find_reading(text: str, target: Target) -> Reading:
    """The target's values in an exporter's text."""
    values = {name: value for name, value in _shares_of(text, target) if value is not None}
    if values:
        return Reading(**values, note="averaged by the exporter over its own collection interval")
    if target.uuid and target.uuid.casefold() in text.casefold():
        raise CounterUnavailableError(f"the exporter has no DCGM_FI_PROF_* values for {target.uuid}: enable them there")
    raise CounterUnavailableError(f"the exporter does not report {target.uuid}")


def _shares_of(text: str, target: Target) -> Iterator[tuple[str, float | None]]:
    for line in text.splitlines():
        parts = _LINE.match(line)
        if parts and parts[1] in FIELDS and _is_about(dict(_LABEL.findall(parts[2])), target):
            yield FIELDS[parts[1]], parse_share(parts[3])


def _is_about(labels: dict[str, str], target: Target) -> bool:
    """By value, as exporters may be told to rename the UUID label; slices carry their board's UUID and GPU_I_ID."""
    wanted_instance = "" if target.mig_instance is None else str(target.mig_instance)
    same_board = (target.uuid or "").casefold() in {value.casefold() for value in labels.values()}
    return same_board and labels.get("GPU_I_ID", "") == wanted_instance


def fetch(address: str, *, timeout_s: float = TIMEOUT_S) -> str:
    """The text at the address; bounded in time and size. Proxies are for the internet, not for this machine."""
    deadline_s = monotonic() + timeout_s
    try:
        with build_opener(ProxyHandler({})).open(address, timeout=timeout_s) as response:
            return b"".join(_read_chunks(response, deadline_s)).decode("utf-8", errors="replace")
    except HTTPError as error:
        error.close()
        raise CounterUnavailableError(f"{address} answers HTTP {error.code}") from error
    except TimeoutError as error:
        raise CounterUnavailableError(f"{address} did not answer within {timeout_s} s") from error
    except URLError as error:
        raise CounterUnavailableError(f"nothing listens on {address} ({error.reason})") from error
    except (OSError, HTTPException, ValueError) as error:
        raise CounterUnavailableError(f"{address} speaks no HTTP ({type(error).__name__})") from error


def _read_chunks(response: HTTPResponse, deadline_s: float) -> Iterator[bytes]:
    """A socket's own timeout restarts with every byte, so a trickling server needs a deadline."""
    num_bytes = 0
    while chunk := response.read1(2**16):
        num_bytes += len(chunk)
        if num_bytes > MAX_BYTES:
            raise CounterUnavailableError(f"the exporter's answer is longer than {MAX_BYTES} bytes")
        if monotonic() > deadline_s:
            raise TimeoutError
        yield chunk
