"""How busy were the GPU's pipes, as a dcgm-exporter on this machine publishes it?

Reads the exporter's Prometheus text from http://127.0.0.1:9400/metrics, or from the address in
FLOPMETER_DCGM_EXPORTER. The exporter needs SYS_ADMIN for the DCGM_FI_PROF_* fields; its reader needs nothing.
Left out: fields that the exporter's counter file does not enable (by default only tensor and memory activity are).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

from flopmeter.counters import CounterUnavailableError, as_share, require_gpu

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
    "PIPE_TENSOR_ACTIVE": "tensor_active",
    "TENSOR_UTIL_RATIO": "tensor_active",
    "DRAM_ACTIVE": "dram_active",
    "DRAM_UTIL_RATIO": "dram_active",
}
_LINE = re.compile(r"DCGM_FI_PROF_(\w+)\{(.*)\}\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def open(uuid: str | None) -> DcgmExporterReader:
    reader = DcgmExporterReader(require_gpu(uuid))
    reader.read()
    return reader


class DcgmExporterReader:
    """Shares as of the exporter's last collection."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def start(self) -> None:
        """Nothing to mark: the exporter samples by its own clock."""

    def read(self) -> dict[str, Any]:
        address = os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS)
        if not address.startswith(("http://", "https://")):
            raise CounterUnavailableError(f"{ADDRESS_VARIABLE} is {address!r}, which is no http address")
        try:
            # Proxies are for the internet, not for this machine.
            with build_opener(ProxyHandler({})).open(address, timeout=TIMEOUT_S) as response:
                text = response.read(MAX_BYTES).decode("utf-8", errors="replace")
        except (OSError, HTTPException, ValueError) as error:
            with suppress(AttributeError):
                error.close()  # type: ignore[union-attr] # an HTTPError holds the connection
            raise CounterUnavailableError(f"no answer from {address} ({error})") from error
        return find_reading(text, self._uuid)

    def close(self) -> None:
        """Nothing is held between readings."""


def find_reading(text: str, uuid: str) -> dict[str, Any]:
    """The GPU's values in an exporter's text. Its UUID is found by value: an exporter's settings may rename the label.

    MIG slices carry their board's UUID and a GPU_I_ID: they are other devices.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        parts = _LINE.match(line)
        if parts is None or parts[1] not in FIELDS:
            continue
        labels = dict(_LABEL.findall(parts[2]))
        if uuid.casefold() in map(str.casefold, labels.values()) and not labels.get("GPU_I_ID"):
            with suppress(ValueError):
                if (share := as_share(float(parts[3]))) is not None:
                    values[FIELDS[parts[1]]] = share
    if values:
        return {**values, "note": "averaged by the exporter over its own collection interval"}
    if uuid.casefold() in text.casefold():
        raise CounterUnavailableError(f"the exporter has no DCGM_FI_PROF_* values for {uuid}: enable them there")
    raise CounterUnavailableError(f"the exporter does not report {uuid}")
