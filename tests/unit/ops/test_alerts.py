"""Rules, the figures they name, and runbooks hold together. Prometheus' own checks are among the container tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.vm import metrics as host_metrics
from ops.vm.alerts import MAX_ALERTS, files_for, routing
from ops.vm.stack import Refused
from runbooks.book import books, read
from tests.fakes.memory_api import FakeRuntime
from tests.fakes.web import serving
from tests.unit.ops.machine import machine
from warmstart.config import load
from warmstart.metrics import Metrics

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "compose" / "prometheus"


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load_yaml(PROMETHEUS / name)["groups"] for rule in group["rules"]]


ALERTS = rules("alerts.yml")
NAMES = [rule["alert"] for rule in ALERTS]
OBJECTIVES = {rule["record"]: float(re.fullmatch(r"vector\((.+)\)", rule["expr"])[1]) for rule in rules("slo.yml")}  # type: ignore[index]


# -- rules


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_says_what_who_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+[smhd]", rule["for"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert (ROOT / rule["annotations"]["runbook"]).is_file()
    assert "{{ $value" not in rule["annotations"]["summary"], "it would be another summary each time"


def test_what_has_to_be_told_is_told() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {
        "SearchDegraded", "EmbeddingQueueStuck", "DiskLow", "BackupStale", "DrillFailed", "CertificateExpiring",
        "ContainerRestarts", "ErrorRate", "SearchSlow", "LancedbCompactionLag", "ApiDown", "WorkerDown",
    } <= set(NAMES)  # fmt: skip


def test_each_alert_is_tested_firing_and_silent() -> None:
    expected: dict[str, set[bool]] = {name: set() for name in NAMES}
    for case in load_yaml(ROOT / "tests" / "containers" / "alert_cases.yml")["tests"]:
        for one in case["promql_expr_test"]:
            [name] = re.findall(r'alertname="(\w+)"', one["expr"])
            expected[name].add(bool(one["exp_samples"]))
    assert {name: found for name, found in expected.items() if found != {True, False}} == {}


def test_the_figures_promised_are_those_of_the_settings() -> None:
    settings = load({})
    assert OBJECTIVES["warmstart:slo:search_budget_seconds"] == settings.search_budget_ms / 1000
    over = next(rule for rule in ALERTS if rule["alert"] == "SearchOverBudget")
    assert f'le="{OBJECTIVES["warmstart:slo:search_budget_seconds"]:.1f}"' in over["expr"]
    used = {name for rule in ALERTS for name in re.findall(r"warmstart:slo:\w+", rule["expr"])}
    assert used == OBJECTIVES.keys() - {"warmstart:slo:search_budget_seconds"}


# -- the figures that rules name


class Figures:
    """Names and, for each, labels with the values seen, by the job that has them."""

    def __init__(self) -> None:
        self.by_job: dict[str, dict[str, dict[str, set[str]]]] = {}

    def add(self, job: str, text: str) -> None:
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, labels = re.fullmatch(r"(\w+)(\{(.*)\})? \S+", line).groups()  # type: ignore[union-attr]
                seen = self.by_job.setdefault(job, {}).setdefault(name, {})
                for label, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or ""):
                    seen.setdefault(label, set()).add(value)


def use_each_once(metrics: Metrics) -> None:
    """Series with labels are there from their first use on."""
    metrics.request_started()
    metrics.request_ended("/v1/memories", "POST", 500, 0.1)
    metrics.search("hybrid", 0.1)
    metrics.degraded("search", "embedding")
    metrics.saved("inline")
    metrics.set_dependency("redis", True)
    metrics.embedded("query", 0.1)
    metrics.embedding_failed("query", "timeout")
    metrics.worker_failed("timeout")
    metrics.set_unindexed_rows("search_text", 0)
    metrics.set_table_versions("memories", 1)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Scraped from the api's and the worker's own endpoints, and from the machine's program."""
    from starlette.testclient import TestClient

    from warmstart.web.probe import create_probe_app

    found = Figures()
    runtime = FakeRuntime()
    use_each_once(runtime.metrics)
    with serving(runtime, key=None) as client:
        found.add("api", client.get("/metrics").raise_for_status().text)
    worker = Metrics()
    use_each_once(worker)
    with TestClient(create_probe_app(worker, lambda: True)) as probe:
        found.add("worker", probe.get("/metrics").raise_for_status().text)
    stack = machine(tmp_path_factory.mktemp("vm"))
    found.add("host", host_metrics.render(host_metrics.collect(stack)))
    return found


def selectors(expr: str) -> list[tuple[str, dict[str, str]]]:
    """Each metric of an expression, with the matchers in its braces."""
    found = []
    for name, _, braces in re.findall(r"\b(up|warmstart_\w+)(\{([^}]*)\})?", expr):
        found.append((name, dict(re.findall(r'(\w+)=~?"([^"]*)"', braces))))
    return found


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_the_figures_of_a_rule_exist(rule: dict[str, Any], figures: Figures) -> None:
    named = selectors(rule["expr"])
    assert named
    jobs = {config["job_name"] for config in load_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    assert figures.by_job.keys() == jobs
    for name, matchers in named:
        of_jobs = [job for job in jobs if re.fullmatch(matchers["job"], job)]
        assert of_jobs, matchers
        for job in of_jobs if name != "up" else []:
            assert name in figures.by_job[job], f"{job} has no {name}"
            seen = figures.by_job[job][name]
            for label, pattern in matchers.items():
                if label not in ("job", "instance"):
                    assert any(re.fullmatch(pattern, value) for value in seen.get(label, ())), f"{name}: {label}"


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_words_in_an_annotation_are_labels_of_the_rule(rule: dict[str, Any], figures: Figures) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    having = {
        label for name, match in selectors(rule["expr"]) if name != "up"
        for job, names in figures.by_job.items() if re.fullmatch(match["job"], job) for label in names[name]
    }  # fmt: skip
    assert used <= having


# -- runbooks


def test_an_alert_and_its_runbook_name_each_other() -> None:
    named = {rule["alert"]: Path(rule["annotations"]["runbook"]) for rule in ALERTS}
    assert {path.parent for path in named.values()} == {Path("runbooks")}
    naming = {alert: name for name in books() for alert in read(name).alerts}
    assert {alert: path.stem for alert, path in named.items()} == naming


# -- what alertmanager is given

SECRETS = {"ALERT_WEBHOOK_TOKEN": "t0ken", "ALERT_SMTP_PASSWORD": "passw0rd"}
WEBHOOK = {"webhook": "https://hooks.example.com/T0/s3cret"}
MAIL = {"mail_to": "ops@example.com", "mail_from": "vm@example.com", "smtp": "mail.example.com:587", "smtp_user": "vm"}


def test_nobody_to_tell_is_no_file() -> None:
    assert files_for({"webhook": "", "mail_to": ""}, SECRETS) == {}


def test_secrets_are_in_files_of_their_own() -> None:
    files = files_for(WEBHOOK | MAIL, SECRETS)
    config = files.pop("alertmanager.yml")
    assert files == {"webhook_url": WEBHOOK["webhook"], "webhook_token": "t0ken", "smtp_password": "passw0rd"}
    assert not any(secret in config for secret in files.values())
    [receiver] = json.loads(config)["receivers"]
    assert receiver["webhook_configs"][0]["max_alerts"] == MAX_ALERTS
    assert receiver["email_configs"] == [{"to": "ops@example.com", "send_resolved": True}]


def test_a_webhook_without_a_token_and_mail_without_a_user_need_no_secret() -> None:
    assert files_for(WEBHOOK, {}).keys() == {"webhook_url", "alertmanager.yml"}
    assert files_for(MAIL | {"smtp_user": ""}, {}).keys() == {"alertmanager.yml"}


def test_a_mail_user_without_a_password_is_refused() -> None:
    with pytest.raises(Refused, match="ALERT_SMTP_PASSWORD"):
        files_for(MAIL, {})


def test_what_keeps_an_alert_back_is_an_alert_itself() -> None:
    for rule in routing()["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            [pattern] = re.findall(r'^alertname=~?"(.+)"$', matcher)
            assert set(pattern.split("|")) <= set(NAMES)
