"""Digests that find the same samples in two shards."""

from __future__ import annotations

import torch

from paceline.data.overlap import digest_of_samples


def test_digests_are_equal_where_samples_are() -> None:
    assert digest_of_samples([torch.zeros(2), torch.ones(2)]) == digest_of_samples([torch.zeros(4)[::2], torch.ones(2)])
    assert digest_of_samples([torch.zeros(2), torch.ones(2)]) != digest_of_samples([torch.zeros(2), torch.ones(1, 2)])
    assert digest_of_samples([{"a": 1}, {"a": 2}]) != digest_of_samples([{"a": 1}, {"b": 2}])
    wave, sparse = torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()
    assert digest_of_samples([wave.conj(), sparse]) == digest_of_samples([wave.conj(), sparse])
    assert digest_of_samples([wave.conj(), sparse]) != digest_of_samples([wave.conj(), 2 * sparse])
    assert digest_of_samples([lambda: 1, 2]) > 0  # an object that cannot be pickled is digested by its repr
    assert digest_of_samples([1]) == digest_of_samples([]) == digest_of_samples([1, 1]) == 0
