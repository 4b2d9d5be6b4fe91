"""How busy were the GPU's pipes, as the NVIDIA driver itself measures it (NVML GPM, Hopper and newer)?

GPM subtracts two samples of the GPU's own counters that were taken more than 0.1 s apart; taking one costs no
synchronisation. No special privilege is documented. Numbers of the metrics: nvml.h of API 13 (NVIDIA/go-nvml).
Left out: there is no split of the tensor pipe by FP8 or FP4, and no conversion from pipe activity to FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from time import monotonic
from typing import Any

from flopmeter.counters import CounterUnavailableError, as_share, require_gpu

DEVICE_TYPE = "cuda"
ORDER = 10

MIN_INTERVAL_S = 0.1
METRICS = {2: "sm_active", 5: "tensor_active", 10: "dram_active"}


def open(uuid: str | None) -> NvmlGpmReader:
    uuid = require_gpu(uuid)
    try:
        nvml: Any = import_module("pynvml")
    except ImportError as error:
        raise CounterUnavailableError("nvidia-ml-py is not installed") from error
    if not hasattr(nvml, "nvmlGpmSampleGet"):
        raise CounterUnavailableError("this pynvml has no GPM calls: run pip install -U nvidia-ml-py")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise CounterUnavailableError(f"no NVML library ({error})") from error
    try:
        return NvmlGpmReader(nvml, uuid)
    except (nvml.NVMLError, CounterUnavailableError) as error:
        nvml.nvmlShutdown()
        raise CounterUnavailableError(str(error)) from error


class NvmlGpmReader:
    """Shares since the last reading, from two samples that change roles after each reading."""

    def __init__(self, nvml: Any, uuid: str, *, clock: Callable[[], float] = monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._board = nvml.nvmlDeviceGetHandleByUUID(uuid)
        if not nvml.nvmlGpmQueryDeviceSupport(self._board).isSupportedDevice:
            raise CounterUnavailableError("this GPU has no GPM (Hopper or newer does)")
        self._older = nvml.nvmlGpmSampleAlloc()
        self._newer = nvml.nvmlGpmSampleAlloc()
        self._older_s: float | None = None

    def start(self) -> None:
        self._nvml.nvmlGpmSampleGet(self._board, self._older)
        self._older_s = self._clock()

    def read(self) -> dict[str, Any]:
        if self._older_s is None:
            raise CounterUnavailableError("read before start")
        if self._clock() - self._older_s <= MIN_INTERVAL_S:
            return {"note": f"less than {MIN_INTERVAL_S} s since the last reading"}
        self._nvml.nvmlGpmSampleGet(self._board, self._newer)
        newer_s = self._clock()
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(METRICS)
        request.sample1, request.sample2 = self._older, self._newer
        for slot, metric_id in enumerate(METRICS):
            request.metrics[slot].metricId = metric_id
        self._nvml.nvmlGpmMetricsGet(request)
        shares = {
            name: as_share(answer.value / 100) if answer.nvmlReturn == self._nvml.NVML_SUCCESS else None
            for name, answer in zip(METRICS.values(), request.metrics, strict=False)
        }
        interval_s = newer_s - self._older_s
        self._older, self._newer, self._older_s = self._newer, self._older, newer_s
        return {**shares, "interval_s": interval_s, "note": "since the last reading"}

    def close(self) -> None:
        self._nvml.nvmlGpmSampleFree(self._older)
        self._nvml.nvmlGpmSampleFree(self._newer)
        self._nvml.nvmlShutdown()
