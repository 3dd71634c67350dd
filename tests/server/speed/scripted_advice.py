"""Stands in for the process that advises: reads its order, and answers as its model's name says."""

from __future__ import annotations

import json
import sys
import time

order = json.load(sys.stdin)
if order["model"] == "slow":
    time.sleep(60)
if order["model"] == "broken":
    sys.exit("no answer")
problem = "it does not fit" if order["model"] == "too large" else ""
advice = {"kind": "machine", "change": "more of it", "speedup_alone": 2.0}
print(json.dumps({"advice": [] if problem else [advice], "problem": problem}))
