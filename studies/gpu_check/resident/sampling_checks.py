"""Checks of sampling: the tokens of the host, and its changes of logits and log-probabilities."""

from __future__ import annotations

import numpy as np
import torch

from moeflow.kernels import device_sample
from moeflow.kernels.logit_edits import Floats, LogitEdits, edited
from moeflow.kernels.sample import RowSampling, sample_rows
from studies.gpu_check.resident.accuracy import Accuracy, by_torch, poisoned_memory

_NUM_ROWS = 4


def check_sampling(accuracy: Accuracy) -> None:
    """Check all of it; logits are float32 in every model."""
    if accuracy.dtype != torch.float32:
        return
    vocab_size = 5003 if accuracy.target.is_rehearsal else 151_936
    logits = accuracy.draw(_NUM_ROWS, vocab_size, scale=3.0)
    _check_tokens(accuracy, logits)
    _check_edits(accuracy, logits)
    _check_logprobs(accuracy, logits)


def _check_tokens(accuracy: Accuracy, logits: torch.Tensor) -> None:
    ways = (
        RowSampling(0),
        RowSampling(0, 1.0),
        RowSampling(0, 0.7, min_p=0.05),
        RowSampling(0, 1.0, top_p=0.9),
        RowSampling(0, 0.6, top_k=20, top_p=0.95),
        RowSampling(0, 1.5, top_k=1000),
    )
    numbers = iter(torch.rand(len(ways) * _NUM_ROWS).tolist())
    samplings = [way._replace(row=row, number=next(numbers)) for way in ways for row in range(_NUM_ROWS)]
    with accuracy.target.kernels(), poisoned_memory():
        found = sample_rows(logits, samplings)
    with by_torch():
        wanted = sample_rows(logits.cpu(), samplings)
    accuracy.take("sampling", [torch.tensor(found)], [torch.tensor(wanted)])


def _check_edits(accuracy: Accuracy, logits: torch.Tensor) -> None:
    from moeflow.kernels.triton import logit_edits

    random = np.random.default_rng(int(accuracy.permutation(1 << 20)[0]))
    vocab_size, num_places = logits.shape[1], 700
    tokens = [random.choice(vocab_size, num_places, replace=False) for _ in range(2)]
    edits = LogitEdits(
        rows=np.array([2, 0], np.int32),
        places=np.stack([np.repeat([0, 1], num_places), np.concatenate(tokens)]).astype(np.int32),
        amounts=random.uniform(0.5, 2.0, (3, 2 * num_places)).astype(np.float32),
        mask_of=np.array([0, -1], np.int32),
        masks=random.integers(0, 256, (1, -(-vocab_size // 8)), np.uint8),
    )
    with accuracy.target.kernels(), poisoned_memory():
        found = logit_edits.edited(logits, edits)
    accuracy.take("changes of logits", [found.cpu().view(torch.int32)], [_bits(edited(logits, edits))])


def _bits(x: Floats) -> torch.Tensor:
    return torch.from_numpy(x).view(torch.int32)


def _check_logprobs(accuracy: Accuracy, logits: torch.Tensor) -> None:
    tokens = accuracy.permutation(logits.shape[1])[:_NUM_ROWS]
    found = device_sample.logprobs(logits, tokens, 20).cpu()
    wanted = logits.double().log_softmax(dim=1).cpu()
    top = wanted.topk(20, dim=1).values
    chosen = wanted.gather(1, tokens.cpu().unsqueeze(1))
    accuracy.take("log-probabilities", [found[:, :1], found[:, 22:]], [chosen, top])
    accuracy.take("ranks", [found[:, 1].long()], [(wanted > chosen).sum(dim=1) + 1])
