"""A page for Prometheus: which gauge does each metric become, and where can it be scraped?

`perf/mfu` becomes `flopmeter_perf_mfu`; the name in `dataset/<name>/loss` becomes a label:
`flopmeter_dataset_loss{dataset="web"}`. What the run is stands once, in the labels of `flopmeter_run_info`; every
sample says whose it is by the labels `job`, `host`, `rank` and `scope`: rank 0's page has the numbers of the whole job
(scope "job"), the pages of the other ranks, where asked for, have their own (scope "rank").
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from flopmeter.errors import ConfigError
from flopmeter.schema import METRICS, METRICS_BY_KEY, Metric
from flopmeter.sinks import SinkContext, load_libraries

logger = logging.getLogger("flopmeter")

_RUN_LABELS = ("run_id", "host", "model", "device", "mode", "convention", "world_size")
_FAMILIES = [metric for metric in METRICS if "<" in metric.key]
"""The metrics with a name of the user's in their key."""


class Series(NamedTuple):
    """Where a metric stands on the page."""

    gauge: str
    help: str
    origin: str
    """The key, or the key with `<name>` in it: two origins never share a gauge."""
    label: str | None = None
    value: str = ""
    """Value of the label."""


class Sink:
    """Serves the latest value of each metric over HTTP, from a registry of its own.

    The page is made when it is asked for, so logging costs next to nothing.
    """

    def __init__(self, context: SinkContext) -> None:
        self._client, _ = load_libraries("prometheus", "prometheus_client", "prometheus_client.core")
        header = {name: context.header[name] for name in _RUN_LABELS if name in context.header}
        self._run = {name: str(value) for name, value in {**header, "rank": context.rank}.items()}
        self._labels = {
            "job": context.config.prometheus.job or context.output_dir.name,
            "host": str(context.header.get("host", "")),
            "rank": str(context.rank),
            "scope": "rank" if context.rank else "job",
        }
        self._latest: dict[str, float] = {}
        self._refused: set[str] = set()
        registry = self._client.CollectorRegistry()
        registry.register(self)
        settings = context.config.prometheus
        local_rank = os.environ.get("LOCAL_RANK", "")  # ranks of one machine need ports of their own
        port = settings.port + (int(local_rank) if context.rank and local_rank.isdecimal() else context.rank)
        try:
            self._server, self._thread = self._client.start_http_server(port, settings.host, registry)
        except OSError as error:
            where = f"cannot listen on {settings.host}:{port} ({error.strerror or error})"
            raise ConfigError(f"prometheus: {where}; set another prometheus.port or prometheus.host") from error

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace what the page shows of these metrics; the others keep their last value."""
        self._latest.update(metrics)

    def collect(self) -> Iterator[Any]:
        """What a scrape gets. Called by the library, in the thread of the request."""
        families = self._client.core
        yield families.InfoMetricFamily("flopmeter_run", "What is being trained, and on what.", value=self._run)
        gauges: dict[str, tuple[str, Any]] = {}
        for key, value in self._latest.copy().items():
            series = series_of(key)
            labels = {**self._labels, **({series.label: series.value} if series.label else {})}
            new = families.GaugeMetricFamily(series.gauge, series.help, labels=list(labels))
            origin, gauge = gauges.setdefault(series.gauge, (series.origin, new))
            if origin == series.origin:
                gauge.add_metric(list(labels.values()), value)
            elif key not in self._refused:
                self._refused.add(key)
                left_out = "prometheus: %r is left out, because %r has the same gauge; rename one of them"
                logger.warning(left_out, key, origin)
        yield from (gauge for _, gauge in gauges.values())

    def close(self) -> None:
        """Stop listening and free the port."""
        self._server.shutdown()
        with suppress(OSError):
            # Loader workers that were forked meanwhile hold this socket too: closing ours alone would leave it open.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


@cache
def series_of(key: str) -> Series:
    """The gauge of a metric key, with the label that a name in the key becomes."""
    for metric in _FAMILIES:
        before, after = re.split(r"<\w+>", metric.key)
        if key.startswith(before) and key.endswith(after) and len(key) > len(before + after):
            name = key.removeprefix(before).removesuffix(after)
            gauge = _gauge_name(before.rstrip("/") + after)
            return Series(gauge, _help(metric), metric.key, before.rstrip("/"), name)
    return Series(_gauge_name(key), _help(METRICS_BY_KEY.get(key)), key)


def _gauge_name(key: str) -> str:
    return "flopmeter_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _help(metric: Metric | None) -> str:
    if metric is None:
        return "Logged by the training script."
    return f"{metric.meaning} Unit: {metric.unit}." if metric.unit else metric.meaning
