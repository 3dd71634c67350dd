"""Says what a wheel lacks and what it has that does not belong there: `python scripts/wheel_files.py WHEEL`.

A wheel has the files of `moeflow/` that git knows, the compiled kernels, and what every wheel says about itself.
Ends with 1 if anything is missing or too much.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = re.compile(r"moeflow/kernels/_cpu\.[\w-]+\.so")
ABOUT = re.compile(r"moeflow-[^/]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/.+)")


def files_of_the_package() -> set[str]:
    """Return the paths below `moeflow/` that git has or would take, as they are in a wheel."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "moeflow"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {path for path in listed.split("\0") if path and (ROOT / path).exists()}


def differences(names: set[str], *, has_kernels: bool = True) -> list[str]:
    """Return the errors in a wheel's files, a line each; nothing if there are none."""
    wanted = files_of_the_package()
    kernels = {name for name in names if KERNELS.fullmatch(name)}
    rest = {name for name in names - kernels - wanted if not ABOUT.fullmatch(name)}
    found = [f"missing: {name}" for name in sorted(wanted - names)] + [f"too much: {name}" for name in sorted(rest)]
    if len(kernels) != has_kernels:
        found.append(f"compiled kernels: {sorted(kernels) or 'none'}, where {int(has_kernels)} is expected")
    return found


def names_in(wheel: Path) -> set[str]:
    """Return the paths of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


if __name__ == "__main__":
    wrong = differences(names_in(Path(sys.argv[1])))
    print("\n".join(wrong) or f"{sys.argv[1]} has the files that it should have")
    sys.exit(bool(wrong))
