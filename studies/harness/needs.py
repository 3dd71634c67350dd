"""Names the remedy, in one line instead of a traceback, where a Python package is missing.

The packages come with moeflow's extras. This module imports only the standard library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]


def explain_missing() -> None:
    """Have an import that fails end this program with one line on stderr."""
    sys.excepthook = _explain


def _explain(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package in ("", "studies"):
        sys.__excepthook__(kind, error, at)
        return
    print(
        f"error: {_name(sys.argv[0])} needs the Python package {package}, which {sys.executable} does not have. "
        f"{remedy(Path(sys.prefix), ROOT / '.venv')}",
        file=sys.stderr,
    )


def _name(file: str) -> str:
    """Return the name of a study from that of its file."""
    path = Path(file).with_suffix("")
    return ".".join((path.parent if path.name == "__main__" else path).relative_to(ROOT).parts)


def remedy(prefix: Path, virtual_environment: Path) -> str:
    """Return what to do where this Python, of that `prefix`, lacks a package."""
    if prefix == virtual_environment:
        return f"Install it: {prefix}/bin/pip install -e '{ROOT}[test]'"
    if (virtual_environment / "bin" / "python").exists():
        return f"Run it with {virtual_environment}/bin/python"
    return f"`{ROOT}/scripts/setup` makes an environment that has it; then run it with {virtual_environment}/bin/python"
