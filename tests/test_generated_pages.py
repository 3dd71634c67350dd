"""Generated parts of the documents are current: the command line, the families, the README's table and chart."""

from __future__ import annotations

import re

from moeflow.bench.records import read
from moeflow.models.registry import FAMILIES
from moeflow.settings.settings import options
from scripts import options_page, readme_chart, readme_models
from tests.documents import ROOT


def test_the_command_line_is_current():
    assert options_page.PAGE.read_text() == options_page.page(), "run scripts/options_page.py"


def test_the_command_line_has_every_setting_once():
    text, *_ = options_page.page().partition("## moeflow ")
    for option in options().values():
        flag = re.escape(option.flag.partition("/")[0])
        assert len(re.findall(rf"^\| `{flag}[` ,]", text, re.MULTILINE)) == 1, option


def test_the_families_are_all_listed():
    text = (ROOT / "docs" / "reference" / "families.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE))
    assert listed == {name: FAMILIES[name].architecture for name in FAMILIES}


def test_the_table_of_models_is_what_is_planned():
    text = readme_models.README.read_text()
    assert text == readme_models.with_table(text), "run scripts/readme_models.py"


def test_the_chart_shows_the_newest_records():
    chart = readme_chart.CHART.read_text()
    found = readme_chart.panels(read(sorted(readme_chart.RESULTS.glob("*.jsonl"))))
    for panel in found:
        assert panel.bars
        for bar in panel.bars:
            assert f">{bar.label}<" in chart, "run scripts/readme_chart.py"
            assert f">{readme_chart.text_of(bar, panel.unit)}<" in chart, "run scripts/readme_chart.py"
