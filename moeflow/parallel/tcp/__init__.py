"""What connects ranks of several machines: authenticated links, and a group over them."""
