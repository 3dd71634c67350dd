"""Answers that must have a form: grammars, checked in a process of their own, and the tokens that these allow."""
