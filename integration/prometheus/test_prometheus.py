"""The alerts and the dashboard by a real Prometheus: rules, their tests, and a scrape of a job that saves and loads."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.waiting import await_that

HERE = Path(__file__).parent
GRAFANA = HERE.parents[1] / "docs" / "grafana"

JOB = """
import sys, time, torch, prometheus_client
import dcp_datastates as ds
from dcp_datastates.monitoring import register_metrics

register_metrics()
prometheus_client.start_http_server(int(sys.argv[2]), "127.0.0.1")
state, step = {"w": torch.ones(1000)}, 0
while True:
    step += 1
    ds.async_save(state, f"{sys.argv[1]}/step-{step % 3}", host_cache_size="64MiB").result()
    ds.load(f"{sys.argv[1]}/step-{step % 3}", dict(state))
    try:
        ds.save(state, f"{sys.argv[1]}/step-{step % 3}", overwrite=False, host_cache_size="64MiB")
    except FileExistsError:
        pass
    time.sleep(0.2)
"""


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: apt-get install prometheus")
    return found


def test_the_rules_are_valid_and_each_alert_fires_when_it_should() -> None:
    promtool = program("promtool")
    subprocess.run([promtool, "check", "rules", GRAFANA / "alerts.yml"], check=True)
    subprocess.run([promtool, "test", "rules", HERE / "alerts_test.yml"], check=True)


def test_each_alert_of_the_file_is_tested_in_both_ways() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"][0]["rules"]
    seen: set[tuple[str, bool]] = set()
    for each in yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]:
        seen |= {(case["alertname"], bool(case["exp_alerts"])) for case in each["alert_rule_test"]}
    assert seen == {(rule["alert"], fires) for rule in rules for fires in (True, False)}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes a job each second."""
    prometheus, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    target, own = free_port(), free_port()
    job = {"job_name": "training", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(GRAFANA / "alerts.yml")],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{own}",
    }
    commands: list[list[str]] = [
        [sys.executable, "-c", JOB, str(folder / "run"), str(target)],
        [prometheus, *(f"--{name}={value}" for name, value in options.items())],
    ]
    with ExitStack() as ends:
        for number, command in enumerate(commands):
            log = ends.enter_context(open(folder / f"log-{number}", "w"))
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            ends.callback(process.wait)
            ends.callback(process.kill)
        yield f"http://127.0.0.1:{own}"


def asked(address: str, path: str, **arguments: str) -> Any:
    try:
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{address}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError:  # it has not started yet, or refuses the expression
        return None


def has_data(address: str, expression: str) -> bool:
    found = asked(address, "query", query=expression)
    values = [float(each["value"][1]) for each in (found or {}).get("result", ())]
    return any(map(math.isfinite, values))


def test_every_expression_of_the_dashboard_has_data(server: str) -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    variables = {"$__rate_interval": "30s", "$job": "training"}
    expressions = [
        each["expr"] for panel in dashboard["panels"] for each in panel.get("targets", ())
    ]
    assert len(expressions) > 10
    for expression in expressions:
        for name, value in variables.items():
            expression = expression.replace(name, value)
        await_that(lambda asks=expression: has_data(server, asks), 60, expression)


def test_the_rules_are_evaluated_without_an_error(server: str) -> None:
    def rules() -> list[dict[str, Any]]:
        found = asked(server, "rules")
        return [rule for group in (found or {}).get("groups", ()) for rule in group["rules"]]

    await_that(lambda: [rule["health"] for rule in rules()] == ["ok"] * 3, 60)
    # The job's refused saves are failures that Prometheus counts.
    await_that(lambda: {rule["name"]: rule["state"] for rule in rules()}["SavesFail"] == "firing")
    assert {rule["name"]: rule["state"] for rule in rules()}["CheckpointTooOld"] == "inactive"
