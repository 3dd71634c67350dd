"""The file describes a workstation by its data sheets: `moeflow plan MODEL --machine workstation`."""

from importlib.resources import files

MACHINE = files(__name__) / "workstation.json"
