"""`moeflow check` against the server of moeflow, whose answers are held against the official clients' types, too."""

from __future__ import annotations


def test_the_server_of_moeflow_conforms(checked):
    results, _ = checked
    assert [(it.area, it.check, it.status, it.reason) for it in results if it.status != "ok"] == []
    assert len(results) > 80
