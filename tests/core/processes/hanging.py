"""Hangs as broken drivers do."""

import time

time.sleep(600)
