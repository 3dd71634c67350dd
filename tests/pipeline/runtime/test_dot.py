"""The graph of a tiny pipeline, word for word, and names that could end a quotation."""

from __future__ import annotations

from moeflow.pipeline.runtime.dot import dot_lines, write_dot
from moeflow.pipeline.sequential import sequential
from moeflow.pipeline.task import Task


def test_the_graph_of_one_layer(tmp_path):
    write_dot(sequential(1, 1), tmp_path / "tasks.dot")
    assert (
        (tmp_path / "tasks.dot").read_text()
        == r"""digraph tasks {
  node [shape=box, style="rounded,filled", fontname="sans-serif"];
  t0 [label="load_weights\nlayer 0", fillcolor="#a6cee3"];
  t1 [label="pre_attention\nlayer 0\nmicro-batch 0", fillcolor="#a6cee3"];
  t0 -> t1;
  t2 [label="attention\nlayer 0\nmicro-batch 0", fillcolor="#a6cee3"];
  t1 -> t2;
  t3 [label="post_attention\nlayer 0\nmicro-batch 0", fillcolor="#a6cee3"];
  t2 -> t3;
  subgraph cluster_lanes { label="lanes";
    lane0 [label="compute", fillcolor="#a6cee3"];
  }
}
"""
    )


def test_lanes_differ_in_colour_and_quotes_are_escaped():
    lines = list(dot_lines([Task(0, 'a"b', None, None, "disk"), Task(1, "c", None, None, "back\\slash", after=(0,))]))
    assert lines[2] == '  t0 [label="a\\"b", fillcolor="#a6cee3"];'
    assert lines[3:5] == ['  t1 [label="c", fillcolor="#b2df8a"];', "  t0 -> t1;"]
    assert '    lane1 [label="back\\\\slash", fillcolor="#b2df8a"];' in lines
