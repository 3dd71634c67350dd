"""Fetches the libraries of the page from the npm registry, as `scripts/vendor-web` runs it.

    scripts/vendor-web            fetch again and write moeflow/server/web/vendor
    scripts/vendor-web --check    say whether the files there are those that were fetched

Packages are pinned by version and by the hash of their archive, and files are taken as they are. `files.json` beside
them has the hash of each, so that a test notices a changed one without the network. To take a newer version, change
the row, run the script once, and put the hash that it complains of into the row, after a look at what is new.
"""

from __future__ import annotations

import argparse
import base64
import fnmatch
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "moeflow" / "server" / "web" / "vendor"
MANIFEST = "files.json"


@dataclass(frozen=True)
class Library:
    """What is taken of one npm package, and where to: patterns of paths inside it, to paths below its folder."""

    folder: str
    package: str
    version: str
    integrity: str  # of the archive, as npm writes it
    files: dict[str, str]


LIBRARIES = (
    Library(
        "markdown-it",
        "markdown-it",
        "15.0.3",
        "sha512-+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        {"LICENSE": "LICENSE.txt", "dist/browser/markdown-it.esm.min.mjs": "markdown-it.js"},
    ),
    Library(
        "highlight",
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"LICENSE": "LICENSE.txt", "es/highlight.min.js": "highlight.js"},  # its "common" languages, about 36
    ),
    Library(
        "katex",
        "katex",
        "0.19.1",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {
            "LICENSE": "LICENSE.txt",
            "dist/katex.min.js": "katex.js",
            "dist/katex.min.css": "katex.css",
            "dist/fonts/*.woff2": "fonts/",  # every browser that the page supports reads this format
        },
    ),
    Library(
        "pdfjs",
        "pdfjs-dist",
        "6.5.438",
        "sha512-vg8Pw1x+AFKy4AMDvhuWl5cOYV8d698UoEANoFFhc79hqXDnZQqnOXoxw3HG907WHOg1JYOvLhP756boddFxpA==",
        {
            "LICENSE": "LICENSE.txt",
            "legacy/build/pdf.min.mjs": "pdf.js",  # "legacy" runs in browsers that are some years old
            "legacy/build/pdf.worker.min.mjs": "pdf.worker.js",
        },
    ),
)


def fetch(library: Library, into: Path) -> Path:
    """Have npm fetch the archive of a package, and return it once its hash is right."""
    name = f"{library.package}@{library.version}"
    packed = subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", str(into), name], check=True, capture_output=True, text=True
    )
    archive = into / packed.stdout.split()[-1]
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != library.integrity:
        sys.exit(f"{name} is not the archive that was pinned: it has {found}, the script {library.integrity}")
    return archive


def take(library: Library, archive: Path) -> None:
    """Write the wanted files of a package, and complain of a pattern that nothing matches."""
    folder = FOLDER / library.folder
    missing = set(library.files)
    with tarfile.open(archive) as members:
        for member in members:
            path = member.name.partition("/")[2]  # archives of npm hold one folder, "package"
            for pattern, target in library.files.items():
                if not (member.isfile() and fnmatch.fnmatchcase(path, pattern)):
                    continue
                file = folder / (target + Path(path).name if target.endswith("/") else target)
                file.parent.mkdir(parents=True, exist_ok=True)
                content = members.extractfile(member)
                assert content is not None
                file.write_bytes(content.read())
                missing.discard(pattern)
    if missing:
        sys.exit(f"{library.package} {library.version} has no {', '.join(sorted(missing))}")


def hashes() -> dict[str, str]:
    """Return the SHA-256 of every file there is, by its path."""
    files = (file for file in sorted(FOLDER.rglob("*")) if file.is_file() and file.name != MANIFEST)
    return {file.relative_to(FOLDER).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    """Fetch the files, or check the present ones."""
    parser = argparse.ArgumentParser(description="Fetch the libraries of the page.")
    parser.add_argument("--check", action="store_true", help="only compare the files with their hashes")
    if parser.parse_args().check:
        noted = json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))["files"]
        changed = sorted(set(noted.items()) ^ set(hashes().items()))
        sys.exit(f"changed: {', '.join(sorted({path for path, _ in changed}))}" if changed else 0)
    with tempfile.TemporaryDirectory() as archives:
        for library in LIBRARIES:
            take(library, fetch(library, Path(archives)))
    packages = {library.folder: f"{library.package} {library.version}" for library in LIBRARIES}
    manifest = json.dumps({"packages": packages, "files": hashes()}, indent=1) + "\n"
    (FOLDER / MANIFEST).write_text(manifest, encoding="utf-8")


if __name__ == "__main__":
    main()
