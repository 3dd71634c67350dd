"""Tests of engines that a Ray cluster runs, without one."""
