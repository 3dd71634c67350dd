"""llama.cpp's quantizer: reads a GGUF file and writes another. The argument is a JSON object; see `quantizer.py`."""

from __future__ import annotations

import json
import sys

import llama_cpp as llama

if __name__ == "__main__":
    wish = json.loads(sys.argv[1])
    params = llama.llama_model_quantize_default_params()
    params.nthread = wish["threads"]
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{wish['type']}")
    sys.exit(llama.llama_model_quantize(wish["source"].encode(), wish["target"].encode(), params))
