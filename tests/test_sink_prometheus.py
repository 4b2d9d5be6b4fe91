"""Scraped over real HTTP on loopback, and read with the Prometheus client's own parser."""

from __future__ import annotations

import errno
import http.client
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flopmeter.config import MonitorConfig
from flopmeter.config.sections import Prometheus
from flopmeter.errors import ConfigError, MissingLibraryError
from flopmeter.schema import METRICS, METRICS_BY_KEY
from flopmeter.sinks import SinkContext, available_sinks
from flopmeter.sinks.prometheus import Sink, series_of

HEADER = {"run_id": "abc", "host": "node1", "model": "GPT", "device": "cpu", "versions": {"torch": "2.13.0"}}
Opener = Callable[..., Sink]


def context(*, port: int = 0, host: str = "127.0.0.1") -> SinkContext:
    """Settings refuse port 0, which lets the system choose; a test needs it."""
    config = MonitorConfig(prometheus={"enabled": True})
    vars(config)["prometheus"] = Prometheus(enabled=True, host=host, port=port)
    return SinkContext(config=config, output_dir=Path("unused"), header=HEADER)


@pytest.fixture
def open_sink() -> Iterator[Opener]:
    pytest.importorskip("prometheus_client", reason="needs flopmeter[prometheus]")
    sinks: list[Sink] = []

    def opener(**settings: Any) -> Sink:
        sinks.append(Sink(context(**settings)))
        return sinks[-1]

    yield opener
    for sink in sinks:
        sink.close()


def scrape(port: int) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    return list(text_string_to_metric_families(page))


def samples(port: int) -> dict[tuple[str, str | None], float]:
    """Values by name and dataset, the description of the run left out."""
    return {
        (sample.name, sample.labels.get("dataset")): sample.value
        for family in scrape(port)
        for sample in family.samples
        if sample.name != "flopmeter_run_info"
    }


def test_every_key_of_the_schema_is_on_the_page_and_nothing_else_is(open_sink: Opener) -> None:
    values = {metric.key: index + 0.25 for index, metric in enumerate(METRICS)}
    sink = open_sink()
    sink.log(7, {key.replace("<name>", "web"): value for key, value in values.items()})
    expected = {
        ("flopmeter_" + key.replace("<name>/", "").replace("/", "_"), "web" if "<name>" in key else None): value
        for key, value in values.items()
    }
    assert ("flopmeter_perf_mfu", None) in expected
    assert ("flopmeter_dataset_loss", "web") in expected
    assert samples(sink.port) == expected


def test_the_page_has_the_latest_value_of_each_metric(open_sink: Opener) -> None:
    sink = open_sink()
    sink.log(1, {"training/loss": 3.0, "perf/mfu": 0.5})
    sink.log(2, {"training/loss": 2.0})
    assert samples(sink.port) == {("flopmeter_training_loss", None): 2.0, ("flopmeter_perf_mfu", None): 0.5}


def test_each_dataset_is_a_label_whatever_its_name(open_sink: Opener) -> None:
    names = ["web", "org/code", 'quo"te', "back\\slash", "line\nbreak", "中文"]
    sink = open_sink()
    sink.log(1, {f"dataset/{name}/loss": float(index) for index, name in enumerate(names)})
    assert samples(sink.port) == {("flopmeter_dataset_loss", name): float(i) for i, name in enumerate(names)}


def test_the_help_has_the_meaning_and_the_unit(open_sink: Opener) -> None:
    sink = open_sink()
    sink.log(1, {"perf/step_time": 0.1, "training/loss": 2.0, "mine": 1.0})
    page = {family.name: family for family in scrape(sink.port)}
    assert page["flopmeter_perf_step_time"].type == "gauge"
    assert page["flopmeter_perf_step_time"].documentation == METRICS_BY_KEY["perf/step_time"].meaning + " Unit: s."
    assert page["flopmeter_training_loss"].documentation == METRICS_BY_KEY["training/loss"].meaning
    assert page["flopmeter_mine"].documentation == "Logged by the training script."


def test_the_run_describes_itself_once(open_sink: Opener) -> None:
    sink = open_sink()
    (family,) = scrape(sink.port)
    (sample,) = family.samples
    assert (sample.name, sample.value) == ("flopmeter_run_info", 1.0)
    assert sample.labels == {"run_id": "abc", "host": "node1", "model": "GPT", "device": "cpu", "rank": "0"}


def test_nan_and_infinity_reach_the_page(open_sink: Opener) -> None:
    sink = open_sink()
    sink.log(1, {"training/loss": math.nan, "training/grad_norm": math.inf, "mine": -math.inf})
    page = samples(sink.port)
    assert math.isnan(page["flopmeter_training_loss", None])
    assert page["flopmeter_training_grad_norm", None] == math.inf
    assert page["flopmeter_mine", None] == -math.inf


@pytest.mark.parametrize(
    ("key", "gauge", "label"),
    [
        ("perf/mfu", "flopmeter_perf_mfu", None),
        ("dataset/web/loss", "flopmeter_dataset_loss", ("dataset", "web")),
        ("dataset/org/web/loss", "flopmeter_dataset_loss", ("dataset", "org/web")),
        ("dataset/web/perplexity", "flopmeter_dataset_web_perplexity", None),
        ("dataset//loss", "flopmeter_dataset__loss", None),
        ("eval/loss@2 %", "flopmeter_eval_loss_2__", None),
    ],
)
def test_a_key_becomes_a_gauge(key: str, gauge: str, label: tuple[str, str] | None) -> None:
    series = series_of(key)
    assert series.gauge == gauge
    assert ((series.label, series.value) if series.label else None) == label


def test_of_two_keys_with_one_gauge_the_first_is_shown_with_one_warning(
    open_sink: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    sink = open_sink()
    sink.log(1, {"eval/loss": 1.0, "eval_loss": 2.0})
    with caplog.at_level(logging.WARNING, logger="flopmeter"):
        assert samples(sink.port) == {("flopmeter_eval_loss", None): 1.0}
        assert samples(sink.port) == {("flopmeter_eval_loss", None): 1.0}
    assert [record.getMessage() for record in caplog.records] == [
        "prometheus: 'eval_loss' is left out, because 'eval/loss' has the same gauge; rename one of them"
    ]


def test_two_sinks_and_the_global_registry_know_nothing_of_each_other(open_sink: Opener) -> None:
    import prometheus_client

    first, second = open_sink(), open_sink()
    first.log(1, {"training/loss": 1.0})
    second.log(1, {"training/loss": 2.0})
    assert samples(first.port) == {("flopmeter_training_loss", None): 1.0}
    assert samples(second.port) == {("flopmeter_training_loss", None): 2.0}
    assert "flopmeter" not in prometheus_client.generate_latest().decode()


def test_a_port_that_is_taken_is_refused_with_the_setting_to_change(open_sink: Opener) -> None:
    taken = open_sink().port
    with pytest.raises(ConfigError) as refusal:
        open_sink(port=taken)
    assert str(refusal.value) == (
        f"prometheus: cannot listen on 127.0.0.1:{taken} ({os.strerror(errno.EADDRINUSE)}); "
        "set another prometheus.port or prometheus.host"
    )


def test_a_host_that_is_not_ours_is_refused(open_sink: Opener) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:9464 \(.+\); set another"):
        open_sink(host="no.such.host.invalid", port=9464)


def test_closing_ends_the_thread_and_frees_the_port(open_sink: Opener) -> None:
    before = set(threading.enumerate())
    sink = open_sink()
    (server,) = set(threading.enumerate()) - before
    port = sink.port
    sink.close()
    assert not server.is_alive()
    with pytest.raises(ConnectionRefusedError):
        scrape(port)
    assert open_sink(port=port).port == port


def test_a_client_that_says_nothing_does_not_hold_up_the_end(open_sink: Opener) -> None:
    sink = open_sink()
    with socket.create_connection(("127.0.0.1", sink.port)):
        assert samples(sink.port) == {}  # served beside the silent one
        sink.close()


@pytest.mark.skipif(sys.platform != "linux", reason="a listening socket can be shut down for its copies on Linux only")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on: fork beside threads
def test_a_forked_worker_that_lives_on_does_not_keep_the_port(open_sink: Opener) -> None:
    sink = open_sink()
    port = sink.port
    hold, release = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(release)
        os.read(hold, 1)  # until the parent lets go
        os._exit(0)
    try:
        sink.close()
        with pytest.raises(ConnectionRefusedError):
            scrape(port)
        assert open_sink(port=port).port == port
    finally:
        os.close(release)
        os.close(hold)
        os.waitpid(worker, 0)


PAGE = (Path(__file__).resolve().parents[1] / "docs" / "logging.md").read_text("utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_command_in_the_docs_gets_the_page(open_sink: Opener) -> None:
    (command,) = re.findall(r"```console\n(curl .*)\n```", PAGE)
    sink = open_sink()
    sink.log(1, {"perf/mfu": 0.5})
    command = command.replace(f":{Prometheus().port}/", f":{sink.port}/")
    done = subprocess.run([*command.split(), "--noproxy", "*"], capture_output=True, text=True, check=True)
    assert re.search(r"^flopmeter_perf_mfu\{.*\} 0\.5$", done.stdout, re.MULTILINE)


def test_the_settings_in_the_docs_switch_on_every_sink() -> None:
    settings, *_ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = MonitorConfig.load(yaml.safe_load(settings))
    assert sorted(config.sink_names) == available_sinks()


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'flopmeter\[prometheus\]'"):
        Sink(context())


def test_every_sample_says_whose_it_is(open_sink: Opener) -> None:
    sink = open_sink()
    sink.log(1, {"perf/mfu": 0.4, "dataset/web/loss": 2.0})
    labels = [s.labels for family in scrape(sink.port) for s in family.samples if s.name != "flopmeter_run_info"]
    own = {"job": "unused", "host": "node1", "rank": "0", "scope": "job"}
    assert labels == [own, {**own, "dataset": "web"}]


def test_another_rank_listens_beside_the_first_and_shows_its_own_numbers(
    open_sink: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    other = Sink(replace(context(port=port - 1), rank=9))
    try:
        other.log(1, {"perf/mfu": 0.4})
        labels = [s.labels for family in scrape(port) for s in family.samples if s.name == "flopmeter_perf_mfu"]
    finally:
        other.close()
    assert [(found["rank"], found["scope"]) for found in labels] == [("9", "rank")]
