"""Does a real Prometheus, which scrapes a real run, answer every query of the dashboard and of the alarms?"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flopmeter import watch
from flopmeter.schema import METRICS_BY_KEY
from flopmeter.sinks.prometheus import series_of

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD = json.loads((DOCS / "grafana_dashboard.json").read_text("utf-8"))
ALERTS = yaml.safe_load((DOCS / "prometheus_alerts.yml").read_text("utf-8"))
QUERIES = sorted({target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]})
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
VARIABLES = {"$job": ".*", "$floor": "0.3", "$__range_s": "60", "$__range": "1m"}
NOT_ON_ONE_CPU = {
    "resource/gpu_memory_bytes": 40e9,
    "resource/gpu_power_w": 400.0,
    "perf/exposed_communication_share": 0.1,
    "perf/tokens_per_second": 1000.0,
    **{f"rank/{name}_time_{which}": 0.1 for name in ("own", "blocked", "step") for which in ("min", "mean", "max")},
    "rank/slowest": 3.0,
    "rank/num_missing": 1.0,
    "rank/memory_max_bytes": 41e9,
}
"""What the run's own log gives, where a single process on a CPU has nothing to measure."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def within(seconds: float, look: Callable[[], Any]) -> Any:
    """What `look` gives as soon as it gives anything; the server may still be starting."""
    deadline_s = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if found := look():
                return found
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.2)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Asks a Prometheus that scrapes a run which goes on."""
    pytest.importorskip("prometheus_client", reason="needs flopmeter[prometheus]")
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on this machine (apt-get install prometheus)")
    folder, port, page = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    shutil.copy(DOCS / "prometheus_alerts.yml", folder)
    scrape = {"job_name": "flopmeter", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{page}"]}]}
    times = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config = {"global": times, "rule_files": ["prometheus_alerts.yml"], "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
        server = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=folder, stdout=log, stderr=log)

    def answer(path: str, **arguments: str) -> Any:
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(address, timeout=20) as response:
            reply = json.load(response)
        assert reply["status"] == "success", reply
        return reply["data"]

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"monitoring": {"sinks": [], "detail_every": 5, "report": False, "peak_flop_per_s": 1e12}}
    try:
        prometheus = {"enabled": True, "port": page}
        with watch(
            model, optimizer, output_dir=folder / "mine", config={**settings, "prometheus": prometheus}
        ) as monitor:
            for step in range(1, 41):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                monitor.log_step(step, epoch=0, loss=loss, grad_norm=None, learning_rate=0.1)
            monitor.log_metrics(NOT_ON_ONE_CPU)
            yield answer
    finally:
        server.terminate()
        server.wait(20)


def filled_in(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    gauges = {series_of(key).gauge for key in METRICS_BY_KEY}
    for query in [*QUERIES, *(rule["expr"] for rule in RULES)]:
        named = {word for word in query.replace("{", " ").replace("[", " ").split() if word.startswith("flopmeter_")}
        assert {word.strip("(").split("(")[-1] for word in named} <= {*gauges, "flopmeter_run_info"}, query
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) >= 12


def test_a_real_prometheus_answers_every_query_of_the_dashboard(ask: Callable[..., Any]) -> None:
    def value(part: str) -> Any:
        (found,) = ask("query", query=filled_in(next(query for query in QUERIES if part in query)))["result"]
        return found

    def unanswered() -> list[str]:
        return [query for query in QUERIES if not ask("query", query=filled_in(query))["result"]]

    assert within(60, lambda: not unanswered()), unanswered()
    mfu = value("flopmeter_perf_mfu{")
    assert 0 < float(mfu["value"][1]) < 1
    assert (mfu["metric"]["job"], mfu["metric"]["scope"], mfu["metric"]["rank"]) == ("mine", "job", "0")
    assert float(value("avg_over_time")["value"][1]) == pytest.approx(400.0 * 60 / 3.6e6)  # kWh: 400 W for a minute
    assert value("bool")["value"][1] == "1"  # a toy's MFU lies below 30 %


def test_every_alarm_is_evaluated_and_those_that_hold_wait_for_their_time(ask: Callable[..., Any]) -> None:
    def rules() -> dict[str, Any]:
        return {rule["name"]: rule for group in ask("rules")["groups"] for rule in group["rules"]}

    expected = {"MfuBelowFloor": "pending", "RankMissing": "pending", "MfuFell": "inactive", "RankSlow": "inactive"}
    within(60, lambda: {name: rule["state"] for name, rule in rules().items()} == expected)
    found = rules()
    assert {name: (rule["state"], rule["health"]) for name, rule in found.items()} == {
        name: (state, "ok") for name, state in expected.items()
    }
    assert found.keys() == {rule["alert"] for rule in RULES}
