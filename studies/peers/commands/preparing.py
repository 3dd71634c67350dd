"""Installing the peers, and writing the model in everyone's format."""

from __future__ import annotations

from pathlib import Path

import click

from studies.peers import model
from studies.peers.commands.options import folder_option
from studies.peers.contestants import EXPORTED
from studies.peers.environments import ENVIRONMENTS, IK_LLAMA_NATIVE, LLAMA, OPENVINO, export
from studies.peers.quantizer import FILE_TYPES, quantize


@click.command()
@folder_option
@click.option("--peer", "peers", type=click.Choice(tuple(ENVIRONMENTS)), multiple=True, help="Only this one.")
@click.option(
    "--ik-llama",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of ik_llama.cpp: compile it for this machine, whose wheel is for AVX2.",
)
def setup(folder: Path, peers: tuple[str, ...], ik_llama: Path | None) -> None:
    """Install the peers: llama.cpp and its server are compiled (an hour on two cores), vLLM takes 3.5 GB of disk.

    Existing files are kept.
    """
    for name in peers or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        if environment.version(folder) is None:
            environment.install(folder, click.echo)
        click.echo(f"{name} {environment.version(folder)}")
    if ik_llama is not None:
        if IK_LLAMA_NATIVE.version(folder) is None:
            IK_LLAMA_NATIVE.install(folder, click.echo, ik_llama)
        click.echo(f"{IK_LLAMA_NATIVE.name} {IK_LLAMA_NATIVE.version(folder)}")


@click.command("model")
@folder_option
def write_model(folder: Path) -> None:
    """Write the model as a Hugging Face folder and as GGUF files. Existing files are kept.

    What only llama.cpp's quantizer or OpenVINO's exporter makes is left out until they are installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / model.FOLDER
    if not (source / "tokenizer.json").exists():  # written last
        click.echo(f"writing {source}")
        model.write_folder(source, model.SHAPE)
    for name, quantization in model.QUANTIZATIONS.items():
        file = folder / model.FILE.format(name)
        if not file.exists():
            click.echo(f"writing {file}")
            unfinished = file.with_suffix(".unfinished")
            model.write_gguf(source, unfinished, quantization)
            unfinished.rename(file)
    if OPENVINO.is_installed(folder) and not (folder / EXPORTED / "openvino_tokenizer.xml").exists():
        click.echo(f"writing {folder / EXPORTED}")
        export(source, folder / EXPORTED, folder)
    for name in FILE_TYPES if LLAMA.is_installed(folder) else ():
        file = folder / model.FILE.format(name)
        if not file.exists():
            click.echo(f"writing {file}")
            quantize(folder / model.FILE.format("bf16"), file, name, folder)
