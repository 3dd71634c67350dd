"""Checkpoints that were made to hang, to fill memory or to raise something raw, and a process to try them in.

Each maker gets an empty folder and returns the path that a user would name. `python -m tests.checkpoint.hostile` tries
them all and prints what each took; --out FILE keeps that as JSON lines.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf

from moeflow.core.errors import CheckpointError
from tests.checkpoint.tiny_models import CONFIGS, finish, gguf_writer, random_weights, write_folder, write_gguf
from tests.forked import forked_context

MAX_BYTES = 500 * 10**6
HANG_S = 120.0  # on a machine that is busy with other things, too
GIGABYTE = 10**9
Maker = Callable[[Path], Path]

FOLDERS: dict[str, Maker] = {}
TOKENIZERS: dict[str, Maker] = {}
VALID: dict[str, Maker] = {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of trying to open something."""

    error: str  # class; empty: none
    message: str
    has_file: bool
    has_remedy: bool
    cpu_s: float
    peak_bytes: int  # of the whole process
    grown_bytes: int  # of these, since it was asked


def _folder(folder: Path, family: str = "mixtral", **config: Any) -> Path:
    return write_folder(folder / "model", random_weights(family), CONFIGS[family] | config)


def _with_config(family: str = "mixtral", **config: Any) -> Maker:
    return lambda folder: _folder(folder, family, **config)


def _with_rope(**rope: Any) -> Maker:
    return _with_config(rope_scaling=rope)


def _replaced(name: str, replace: Callable[[Path], object], *, num_shards: int = 1) -> Maker:
    """Return a maker of a model one of whose files is something else."""

    def make(folder: Path) -> Path:
        path = write_folder(folder / "model", random_weights("llama"), CONFIGS["llama"], num_shards)
        (path / "tokenizer.json").write_text("{}")
        (path / name).unlink(missing_ok=True)
        replace(path / name)
        return path

    return make


def _sparse(num_bytes: int = GIGABYTE) -> Callable[[Path], object]:
    def make(file: Path) -> None:
        file.touch()
        os.truncate(file, num_bytes)

    return make


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    finally:
        os.chdir(here)


def _text(text: str | Callable[[], str]) -> Callable[[Path], object]:
    return lambda file: file.write_text(text if isinstance(text, str) else text())


def _header(make: Callable[[], str], more: bytes = b"") -> Callable[[Path], object]:
    def write(file: Path) -> None:
        data = make().encode()
        file.write_bytes(struct.pack("<Q", len(data)) + data + more)

    return write


def _entry(shape: Any, **fields: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4], **fields}})


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a socket": _socket,
    "a folder": lambda file: file.mkdir(),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to nowhere": lambda file: file.symlink_to("nowhere"),
    "a gigabyte": _sparse(),
}
for what, replace in KINDS.items():
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        FOLDERS[f"{what} as {name}"] = _replaced(name, replace)
    for name in ("model.safetensors.index.json", "model-00002-of-00003.safetensors"):
        FOLDERS[f"{what} as {name}"] = _replaced(name, replace, num_shards=3)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        TOKENIZERS[f"{what} as {name}"] = _replaced(name, replace)

for key in ("num_hidden_layers", "num_local_experts", "vocab_size", "hidden_size", "intermediate_size"):
    for size in (10**5, 10**6, 10**9, 10**18, 10**4000):
        FOLDERS[f"{key} 1e{len(str(size)) - 1}"] = _with_config(**{key: size})
for key in ("num_attention_heads", "head_dim", "max_position_embeddings", "sliding_window", "num_experts_per_tok"):
    FOLDERS[f"{key} 1e30"] = _with_config(**{key: 10**30})
FOLDERS |= {
    f"{family} of 1e9 layers": _with_config(family, num_hidden_layers=10**9) for family in ("llama", "qwen3_moe")
}
FOLDERS |= {
    "heads of 1e9 dimensions": _with_config(head_dim=10**9, num_attention_heads=10**9, num_key_value_heads=10**9),
    "1e5 layers without experts": _with_config("qwen3_moe", num_hidden_layers=10**5, decoder_sparse_step=10**6),
    "a million layers listed": _with_config("qwen3_moe", mlp_only_layers=["x"] * 400_000),
    "eos of text": _with_config(eos_token_id="x"),
    "eos of text in a list": _with_config(eos_token_id=[1, "x"]),
    "eos below 0": _with_config(eos_token_id=-1),
    "eos that is true": _with_config(eos_token_id=True),
    "eos of text beside a config": _replaced("generation_config.json", _text('{"eos_token_id": "x"}')),
    "eps below 0": _with_config(rms_norm_eps=-1e-5),
    "eps of 0": _with_config(rms_norm_eps=0.0),
    "eps of 1e30": _with_config(rms_norm_eps=1e30),
    "yarn by 1e-300": _with_rope(rope_type="yarn", factor=1e-300),
    "yarn by 1e300": _with_rope(rope_type="yarn", factor=1e300),
    "yarn with beta 1e-300": _with_rope(rope_type="yarn", factor=4.0, beta_fast=1e-300),
    "yarn with attention factor -1": _with_rope(rope_type="yarn", factor=4.0, attention_factor=-1.0),
    "yarn with attention factor 0": _with_rope(rope_type="yarn", factor=4.0, attention_factor=0.0),
    "yarn with mscale -8": _with_rope(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=-8.0),
    "yarn with the whole of 1e30 tokens": _with_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=10**30
    ),
    "linear by 1e-300": _with_rope(rope_type="linear", factor=1e-300),
    "linear by -1": _with_rope(rope_type="linear", factor=-1.0),
    "llama3 with a frequency below 0": _with_rope(
        rope_type="llama3", factor=8.0, low_freq_factor=-1.0, high_freq_factor=4.0
    ),
    "llama3 with a frequency of 1e300": _with_rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1e300
    ),
    "theta of 1e300": _with_config(rope_theta=1e300),
    "a size that is no number": _with_config(hidden_size=float("nan")),
    "a size of text": _with_config(hidden_size="8" * 1_000_000),
    "a size of a list": _with_config(hidden_size=[1] * 100_000),
    "a type of a megabyte": _with_config(model_type="x" * 1_000_000),
    "an activation of a list": _with_config(hidden_act=["silu"] * 100_000),
    "a key of a megabyte, twice": _replaced("config.json", _text(lambda: '{"%s": 1, "%s": 2}' % (("k" * 10**6,) * 2))),
    "a config of brackets": _replaced("config.json", _text(lambda: "[" * 100_000)),
    "a config of empty lists": _replaced("config.json", _text(lambda: "[" + "[]," * 2_500_000 + "[]]")),
    "a config of a long number": _replaced("config.json", _text('{"hidden_size": %s}' % ("9" * 100_000))),
    "an index of empty lists": _replaced(
        "model.safetensors.index.json", _text(lambda: "[" + "[]," * 10_000_000 + "[]]"), num_shards=3
    ),
    "an index out of the folder": _replaced(
        "model.safetensors.index.json",
        _text(lambda: '{"weight_map": {"x": "../%s.safetensors"}}' % ("y" * 10**6)),
        num_shards=3,
    ),
    "100,000 dimensions": _replaced("model.safetensors", _header(lambda: _entry([1] * 100_000), bytes(4))),
    "dimensions beyond 64 bits": _replaced("model.safetensors", _header(lambda: _entry([2**40] * 8), bytes(4))),
    "a dimension of 4,000 digits": _replaced("model.safetensors", _header(lambda: _entry([10**4000]), bytes(4))),
    "100,000 offsets": _replaced(
        "model.safetensors", _header(lambda: _entry([1], data_offsets=[1] * 100_000), bytes(4))
    ),
    "a type of a megabyte in a header": _replaced(
        "model.safetensors", _header(lambda: _entry([1], dtype="F" * 10**6), bytes(4))
    ),
    "a tensor's name of a megabyte": _replaced(
        "model.safetensors", _header(lambda: _entry([1]).replace("x", "x" * 10**6), bytes(4))
    ),
    "a header of empty lists": _replaced("model.safetensors", _header(lambda: "[" + "[]," * 9_000_000 + "[]]")),
    "a header of 90 MB": _replaced("model.safetensors", _header(lambda: '{"x": "' + "y" * 90_000_000 + '"}')),
    "a header longer than all files": _replaced(
        "model.safetensors", lambda file: file.write_bytes(b"\xff" * 7 + b"\x7f" + bytes(100))
    ),
    "half a million tensors": _replaced(
        "model.safetensors",
        _header(
            lambda: (
                "{"
                + ",".join(f'"{i}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' for i in range(500_000))
                + "}"
            )
        ),
    ),
}


def _gguf_of(*numbers: int, more: Callable[[], bytes] = bytes) -> Maker:
    """Return a maker of a file that says it has so many tensors and keys."""

    def make(folder: Path) -> Path:
        file = folder / "model.gguf"
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *numbers) + more())
        return file

    return make


def _gguf_with(**values: Any) -> Maker:
    """Return a maker of a file whose metadata are hostile: (setter of gguf's writer) -> value."""

    def make(folder: Path) -> Path:
        file = folder / "model.gguf"
        writer = gguf_writer(file, "mixtral", skip=tuple(values))
        for setter, value in values.items():
            getattr(writer, setter)(value)
        for name, tensor in random_weights("llama").items():
            if name == "model.norm.weight":
                writer.add_tensor("output_norm.weight", tensor.numpy())
            if name == "model.embed_tokens.weight":
                writer.add_tensor("token_embd.weight", tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return make


def _part_of(count: int) -> Maker:
    """Return a maker of the first of so many parts, which is alone."""

    def make(folder: Path) -> Path:
        file = folder / f"model-00001-of-{min(count, 99999):05}.gguf"
        writer = gguf_writer(file, "llama")
        for key, value in (("split.no", 0), ("split.count", count), ("split.tensors.count", 2**63)):
            writer.add_uint64(key, value)
        for name, tensor in random_weights("llama").items():
            if name == "model.norm.weight":
                writer.add_tensor("output_norm.weight", tensor.numpy())
        finish(writer)
        return file

    return make


def _trailing(num_bytes: int) -> Maker:
    def make(folder: Path) -> Path:
        file = write_gguf(folder / "model.gguf", "llama", random_weights("llama"))
        with file.open("ab") as stream:
            stream.write(bytes(num_bytes))
        return file

    return make


def _million_experts(folder: Path) -> Path:
    """Write a stack of a million experts as a sparse file."""
    file = folder / "model.gguf"
    count = 10**6
    writer = gguf_writer(file, "mixtral", skip=("add_expert_count",))
    writer.add_expert_count(count)
    writer.add_tensor_info(
        "blk.0.ffn_up_exps.weight", (count, 1, 32), gguf.quants.np.dtype("float32"), count * 128, None
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, -(-file.stat().st_size // 32) * 32 + count * 128)
    return file


def _long_vocabulary(file: Path) -> None:
    vocab = {str(number): number for number in range(1_900_000)}
    file.write_text(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _array_of(kind: int, count: int) -> bytes:
    return _string(b"k") + struct.pack("<IIQ", 9, kind, count)


FOLDERS |= {
    "bytes behind a GGUF file's tensors": _trailing(64),
    "a megabyte behind a GGUF file's tensors": _trailing(10**6),
    "2^60 GGUF tensors": _gguf_of(2**60, 0),
    "2^60 GGUF keys": _gguf_of(1, 2**60),
    "2^63 GGUF parts": _part_of(2**63),
    "65535 GGUF parts": _part_of(2**16 - 1),
    "a GGUF part alone": _part_of(512),
    "a GGUF array of 2^25 strings": _gguf_of(1, 1, more=lambda: _array_of(8, 2**25) + bytes(2**25 * 8)),
    "a GGUF array of 2^25 numbers": _gguf_of(1, 1, more=lambda: _array_of(6, 2**25) + bytes(2**25 * 4)),
    "a GGUF array of 2^60 numbers": _gguf_of(1, 1, more=lambda: _array_of(6, 2**60)),
    "GGUF arrays without end": _gguf_of(
        1, 9, more=lambda: b"".join(_array_of(0, 2**20).replace(b"k", bytes([97 + i])) + bytes(2**20) for i in range(9))
    ),
    "a GGUF array of arrays": _gguf_of(1, 1, more=lambda: _array_of(9, 2**20)),
    "a GGUF string of 2^40 bytes": _gguf_of(1, 1, more=lambda: _string(b"k") + struct.pack("<IQ", 8, 2**40)),
    "a GGUF key of a megabyte": _gguf_of(1, 1, more=lambda: _string(b"k" * 10**6)),
    "a GGUF tensor's name of a megabyte": _gguf_of(1, 0, more=lambda: _string(b"n" * 10**6)),
    "1e5 GGUF layers": _gguf_with(add_block_count=10**5),
    "4e9 GGUF layers": _gguf_with(add_block_count=4 * 10**9),
    "4e9 GGUF experts": _gguf_with(add_expert_count=4 * 10**9),
    "a GGUF width of 4e9": _gguf_with(add_embedding_length=4 * 10**9),
    "a GGUF vocabulary of 4e9": _gguf_with(add_vocab_size=4 * 10**9),
    "4e9 GGUF heads": _gguf_with(add_head_count=4 * 10**9, add_head_count_kv=4 * 10**9),
    "GGUF eps below 0": _gguf_with(add_layer_norm_rms_eps=-1e-5),
    "a GGUF theta of 1e30": _gguf_with(add_rope_freq_base=1e30),
    "a million GGUF experts": _million_experts,
    "a FIFO as a GGUF file": lambda folder: (os.mkfifo(folder / "model.gguf"), folder / "model.gguf")[1],
    "a link to itself as a GGUF file": lambda folder: KINDS["a link to itself"](folder / "m.gguf") or folder / "m.gguf",
    "a link to itself as a folder": lambda folder: KINDS["a link to itself"](folder / "m") or folder / "m",
    "a device as a model": lambda folder: Path("/dev/zero"),
    "a name beyond what there may be": lambda folder: folder / ("x" * 300),
}
TOKENIZERS |= {
    "a tokenizer of empty lists": _replaced("tokenizer.json", _text(lambda: "[" + "[]," * 20_000_000 + "[]]")),
    "a tokenizer of brackets": _replaced("tokenizer.json", _text(lambda: "[" * 1_000_000)),
    "a tokenizer of one string": _replaced("tokenizer.json", _text(lambda: '{"version": "%s"}' % ("x" * 60_000_000))),
    "a tokenizer of a long vocabulary": _replaced("tokenizer.json", _long_vocabulary),
    "settings of a tokenizer in brackets": _replaced("tokenizer_config.json", _text(lambda: "[" * 100_000)),
}
VALID |= {
    "a folder": _folder,
    "a GGUF file": lambda folder: write_gguf(folder / "m.gguf", "llama", random_weights("llama")),
    "links to files": lambda folder: _linked(folder),
}


def _linked(folder: Path) -> Path:
    path = _folder(folder)
    for file in list(path.iterdir()):
        file.rename(folder / file.name)
        file.symlink_to(folder / file.name)
    return path


# ---- trying them ----


def attempt(maker: str, path: str, reply: Any) -> None:
    """Open a model as the engine does, in a process of its own; tell `reply` an Outcome."""
    from moeflow.planner.resolve import resolve
    from moeflow.settings.settings import Settings
    from moeflow.text.tokenizer import Tokenizer

    before = _peak_bytes()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MAX_BYTES, -1))
    start = time.process_time()
    error: BaseException | None = None
    try:
        if maker in TOKENIZERS:
            Tokenizer.load(path)
        else:
            resolve(Settings(model=path, device="cpu"))
    except BaseException as caught:
        error = caught
    is_ours = isinstance(error, CheckpointError)
    reply.send(
        Outcome(
            "" if error is None else CheckpointError.__name__ if is_ours else type(error).__name__,
            "" if error is None else str(error)[:5000],
            is_ours and bool(error.file),
            is_ours and bool(error.remedy),
            time.process_time() - start,
            _peak_bytes(),
            _peak_bytes() - before,
        )
    )


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Trials:
    """Tries makers, each in a fresh process that has everything imported already."""

    def __init__(self) -> None:
        self._context = forked_context()

    def run(self, maker: str, folder: Path) -> Outcome:
        """Raises: TimeoutError if it hangs."""
        path = (FOLDERS | TOKENIZERS | VALID)[maker](folder)
        here, there = self._context.Pipe(duplex=False)
        child = self._context.Process(target=attempt, args=(maker, str(path), there))
        child.start()
        there.close()
        try:
            if not here.poll(HANG_S):
                raise TimeoutError(f"{maker} hangs")
            outcome: Outcome = here.recv()
            return outcome
        except EOFError:
            raise AssertionError(f"{maker} ended the process: {child.exitcode}") from None
        finally:
            child.kill()
            child.join()
            here.close()


def main() -> None:
    """Try all, and print the worst last."""
    trials, records = Trials(), []
    for maker in (*FOLDERS, *TOKENIZERS):
        with tempfile.TemporaryDirectory() as folder:
            outcome = trials.run(maker, Path(folder))
        records.append({"case": maker, **asdict(outcome)})
        took = f"{outcome.cpu_s:6.2f} s {outcome.grown_bytes / 1e6:6.0f} MB"
        print(f"{took}  {maker}: {outcome.error} {outcome.message[:150]}", flush=True)
    for key in ("cpu_s", "peak_bytes", "grown_bytes"):
        worst = max(records, key=lambda record: record[key])
        print(f"most {key}: {worst[key]:.6g} ({worst['case']})")
    if "--out" in sys.argv:
        Path(sys.argv[sys.argv.index("--out") + 1]).write_text("".join(json.dumps(it) + "\n" for it in records))


if __name__ == "__main__":
    main()
