"""Recorded series and alerts: each fires and keeps still where it should, and says what to do."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from tests.dashboards import queries
from tests.support.forms import long_form

ALERTS = [rule for rule in queries.rules() if "alert" in rule]
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian and Ubuntu: apt-get install prometheus)"
)


def _promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)


@needs_promtool
def test_prometheus_can_read_the_configuration():
    done = _promtool("check", "config", str(queries.FOLDER / "prometheus" / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_where_they_should():
    done = _promtool("test", "rules", str(queries.RULE_TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


@long_form
@needs_promtool
@pytest.mark.parametrize(("limit", "other"), [("> 1.3", "> 1.6"), ("> 0.1", "> 0.01"), ("for: 2m", "for: 20m")])
def test_their_tests_notice_another_limit(tmp_path, limit, other):
    rules = queries.RULES.read_text(encoding="utf-8")
    assert rules.count(limit) == 1
    (tmp_path / "rules.yaml").write_text(rules.replace(limit, other), encoding="utf-8")
    tests = queries.RULE_TESTS.read_text(encoding="utf-8").replace("../rules/planaria.yaml", "rules.yaml")
    (tmp_path / "tests.yaml").write_text(tests, encoding="utf-8")
    done = _promtool("test", "rules", str(tmp_path / "tests.yaml"))
    assert done.returncode != 0 and "FAILED" in done.stdout + done.stderr


def test_every_alert_is_tested_firing_and_not_firing():
    tests = yaml.safe_load(queries.RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in ALERTS}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_every_alert_has_a_chapter_in_the_runbook():
    runbook = (queries.ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    chapters = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", runbook, re.M | re.S)
    assert sorted(name for name, _ in chapters) == sorted(rule["alert"] for rule in ALERTS)
    for name, text in chapters:
        for part in ("**What it means.**", "**First look.**", "**What to do.**"):
            assert part in text, f"{name}: {part}"
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{" in rule["annotations"]["summary"], f"{rule['alert']}: which run?"
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((queries.FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service["volumes"]]
    folders = [mount for mount in mounts if mount.startswith(".")]
    assert folders and all((queries.FOLDER / folder).is_dir() for folder in folders)
    assert {mount for mount in mounts if mount not in folders} == set(compose["volumes"])
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (queries.FOLDER / "grafana" / "dashboards" / home.rsplit("/", 1)[1]).is_file()
