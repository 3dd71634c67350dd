"""What passes cost: bytes, operations and seconds, from shapes, formats and rooflines."""
