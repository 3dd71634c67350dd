"""Structs of a C header as ctypes has them: for a library that is newer than the package that hands it on."""

from __future__ import annotations

import ctypes
import re

_KINDS = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}


def read_struct(header: str, name: str) -> type[ctypes.Structure]:
    """Return a struct of plain members, one a declaration. Raises: ValueError if there is none, KeyError for a member
    of a kind that is not known here."""
    found = re.search(rf"struct {name} \{{(.*?)\n\s*\}}", header, re.DOTALL)
    if found is None:
        raise ValueError(f"the header has no struct {name}")
    body = re.sub(r"//[^\n]*", "", found[1])
    members = [declaration.split() for declaration in body.split(";") if declaration.strip()]
    fields = [(words[-1].lstrip("*"), _kind(words)) for words in members]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _kind(words: list[str]) -> type:
    if "*" in "".join(words) or words[0].endswith("_callback"):
        return ctypes.c_void_p
    return ctypes.c_int if words[0] == "enum" else _KINDS[words[0]]
