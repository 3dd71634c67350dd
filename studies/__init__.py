"""Studies: each measures or predicts to answer a question. `python -m studies.NAME --help` in a checkout runs one.

They use `moeflow` and are no part of its wheel. `docs/studies/` has their records and the page of all results.
"""

import sys

from studies.harness.needs import explain_missing

if sys.argv[0] == "-m":  # Python looks for the study that it is to run
    explain_missing()
