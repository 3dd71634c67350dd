"""Trainings on texts with one word per class: accuracy, the same bits after a stop, larger classifiers."""

import pytest
import torch

from moeflow.core.errors import ConfigError
from moeflow.train.classifiers.enlarging import check_enlarging, enlarge
from moeflow.train.classifiers.labelled_text import LabelledText, labelled_text, read_lines
from moeflow.train.classifiers.network import ClassifierShape, SwitchClassifier
from moeflow.train.classifiers.recipe import ClassifierRecipe
from moeflow.train.classifiers.training import ClassifierTask, accuracy, class_logits, split
from moeflow.train.loop import TrainingLoop
from moeflow.train.schedule import Schedule
from moeflow.train.work_folder import StateFile
from tests.train.classifiers.test_network import shape
from tests.train.classifiers.toy import write_texts


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = write_texts(tmp_path_factory.mktemp("texts") / "train.tsv", 240)
    words: dict[str, int] = {}
    return labelled_text(
        file, read_lines(file), ["0", "1"], lambda line: [words.setdefault(word, len(words)) for word in line.split()]
    )


def task(text, **changes):
    torch.manual_seed(0)
    sizes = shape(num_classes=2, **changes)
    network = SwitchClassifier(sizes, torch.randn(16, sizes.hidden_size), dropout=0.1)
    return ClassifierTask(network, text, ClassifierRecipe(learning_rate=1e-2, batch_size=16, seed=3))


@pytest.fixture(scope="module")
def trained(text):
    one = task(text)
    loop = TrainingLoop(one, Schedule(epochs=12))
    loop.run()
    assert loop.progress.best_loss < 0.3
    return one


def test_a_classifier_learns_which_words_tell(trained):
    assert accuracy(trained.network, trained.held_out) > 0.9


def test_interrupted_training_ends_with_the_same_bits(text, tmp_path):
    def stop(progress):
        if (progress.epoch, progress.epoch_step) == (1, 3):
            raise KeyboardInterrupt

    whole, second = task(text), task(text)
    TrainingLoop(whole, Schedule(epochs=2)).run()
    state = StateFile(tmp_path / "training.safetensors")
    with pytest.raises(KeyboardInterrupt):
        TrainingLoop(task(text), Schedule(epochs=2), state).run(stop)
    torch.randn(7)  # another state of chance
    TrainingLoop(second, Schedule(epochs=2), state).run()
    assert all(torch.equal(second.weights[name], weight) for name, weight in whole.weights.items())


def test_a_larger_classifier_begins_with_what_the_small_one_knows(trained, text):
    small = trained.network
    sizes = ClassifierShape(**{**vars_of(small.shape), "num_experts": 24})
    large = SwitchClassifier(sizes, small.embed.weight.detach(), dropout=0.1)
    enlarge(small, large, text, seed=1)
    assert (class_logits(large, text).argmax(1) == class_logits(small, text).argmax(1)).float().mean() > 0.9
    with torch.no_grad():
        before, after = (network(text.token_ids)[1] for network in (small, large))
    first = (after[0].experts // 4 == before[0].experts).float().mean()
    assert first > 0.6  # most tokens go to a copy of their expert
    assert len(after[0].experts.unique()) > 1.5 * len(before[0].experts.unique())
    copies = [large.state_dict()[f"encoder.block.1.layer.1.mlp.experts.expert_{at}.wi.weight"] for at in (0, 1)]
    assert not torch.equal(*copies)
    assert torch.nn.functional.cosine_similarity(copies[0].flatten(), copies[1].flatten(), dim=0) > 0.99


def test_enlarging_by_nothing_changes_nothing(trained, text):
    small = trained.network
    same = SwitchClassifier(small.shape, small.embed.weight.detach(), dropout=0.1)
    enlarge(small, same, text, seed=1)
    assert torch.equal(class_logits(same, text), class_logits(small, text))


@pytest.mark.parametrize("after", [3, 9, 15])
def test_experts_are_copied_equally_often(after):
    with pytest.raises(ConfigError, match="multiple of the 6"):
        check_enlarging(6, after)


def test_a_tenth_is_held_out(text):
    learn, held_out = split(text)
    assert (len(learn.token_ids), len(held_out.token_ids)) == (216, 24)
    assert torch.equal(held_out.token_ids[1], text.token_ids[19])
    assert held_out.classes[1] == text.classes[19]
    with pytest.raises(ConfigError, match="9 texts are too few"):
        split(text.part(range(9)))


def vars_of(sizes):
    return {name: getattr(sizes, name) for name in ClassifierShape.__slots__}


def test_files_are_read_line_by_line(tmp_path):
    file = tmp_path / "texts.tsv"
    file.write_text("a\tb good\tyes\r\n\nbad\tno\n", encoding="utf-8-sig")
    assert read_lines(file) == [("a\tb good", "yes"), ("bad", "no")]
    found = labelled_text(file, read_lines(file), ["no", "yes"], lambda text: list(map(ord, text)) * 200)
    assert isinstance(found, LabelledText)
    assert found.classes.tolist() == [1, 0]
    assert list(map(len, found.token_ids)) == [512, 512]
    with pytest.raises(ConfigError, match="the label 'yes'; the texts to learn from"):
        labelled_text(file, read_lines(file), ["no"], lambda text: [1])
    with pytest.raises(ConfigError, match="has no tokens"):
        labelled_text(file, read_lines(file), ["no", "yes"], lambda text: [])


@pytest.mark.parametrize("line", ["no label", "text\t", "\tlabel", "text\ttwo words"])
def test_a_line_that_is_wrong_is_named(tmp_path, line):
    file = tmp_path / "texts.tsv"
    file.write_text(f"good\tyes\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"texts\.tsv, line 2: each line is a text, a tab"):
        read_lines(file)


def test_a_file_without_text_is_refused(tmp_path):
    (tmp_path / "empty.tsv").write_text("\n")
    (tmp_path / "binary.tsv").write_bytes(b"\xff\xfe\t1\n")
    for name, complaint in {"empty": "no lines", "binary": "UTF-8", "missing": "cannot read"}.items():
        with pytest.raises(ConfigError, match=complaint):
            read_lines(tmp_path / f"{name}.tsv")
