"""taskd.ElasticSampler: the same samples in each step, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import taskd


@pytest.fixture
def world(monkeypatch):
    """Be this rank of so many."""

    def be(rank: int, size: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)

    return be


def shares(world, sampler: taskd.ElasticSampler, step: int, size: int) -> list[list]:
    found = []
    for rank in range(size):
        world(rank, size)
        found.append(sampler.of(step))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("micro", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_ranks_together_take_the_global_batch(world, size, micro, shuffle) -> None:
    sampler = taskd.ElasticSampler(23, 10, micro_batch_size=micro, shuffle=shuffle, seed=4)
    for step in (0, 1, 2, 17):
        found = shares(world, sampler, step, size)
        taken = [
            index
            for batches in found
            for batch in batches
            for index in batch.indices
            if batch.weight
        ]
        assert sorted(taken) == sorted(sampler.global_batch(step))
        assert len({len(batches) for batches in found}) == 1
        for batches in found:
            assert [batch.is_last for batch in batches] == [False] * (len(batches) - 1) + [True]
            assert all(batch.indices for batch in batches)
            assert all(len(batch.indices) <= (micro or 10) for batch in batches)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_gradient_is_the_mean_over_the_global_batch(world, size: int) -> None:
    inputs, weights = torch.randn(40, 3), torch.randn(3, requires_grad=True)
    sampler = taskd.ElasticSampler(40, 14, micro_batch_size=3)
    for step in range(4):
        gradient = torch.zeros(3)
        for batches in shares(world, sampler, step, size):
            for batch in batches:
                loss = (inputs[batch.indices] @ weights).square().mean() * batch.weight
                (own,) = torch.autograd.grad(loss, weights)
                gradient += own / size  # as DDP averages
        loss = (inputs[sampler.global_batch(step)] @ weights).square().mean()
        (expected,) = torch.autograd.grad(loss, weights)
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_pass_takes_each_sample_once_and_the_next_in_another_order() -> None:
    sampler = taskd.ElasticSampler(12, 4, seed=1)
    passes = [
        [index for step in range(first, first + 3) for index in sampler.global_batch(step)]
        for first in (0, 3)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(12))
    assert passes[0] != passes[1]
    assert sampler.global_batch(0) == passes[0][:4], "asked again"


@pytest.mark.parametrize("numbers", [(0, 4, 1), (4, 0, 1), (4, 4, -1)])
def test_numbers_that_make_no_sense(numbers) -> None:
    size, batch_size, micro = numbers
    with pytest.raises(ValueError, match="it is a number from 1"):
        taskd.ElasticSampler(size, batch_size, micro_batch_size=micro)


def test_more_ranks_than_samples(world) -> None:
    world(0, 5)
    with pytest.raises(ValueError, match="a global batch of 4 samples is too small for 5 ranks"):
        taskd.ElasticSampler(8, 4).of(0)
