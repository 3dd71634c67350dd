"""`python -m moeflow`: the `moeflow` command, where it is not on the PATH."""

from moeflow.cli.main import main

if __name__ == "__main__":
    main(prog_name="moeflow")
