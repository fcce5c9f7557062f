"""Tests that each worker has its own part of the training images, and all have the same others."""

import numpy as np
import pytest

import datasets
from elastic.errors import UserError


def labels_of(share, **more):
    return datasets.find_images('digits', 16, 8, share=share, **more).train.labels()


def test_parts_are_equal_disjoint_and_together_all_but_the_last_few():
    whole = labels_of((0, 1), train_images=50)
    parts = [labels_of((index, 3), train_images=50) for index in range(3)]
    assert [len(part) for part in parts] == [16, 16, 16]
    assert (np.stack(parts, axis=1).reshape(-1) == whole[:48]).all()


def test_workers_test_on_the_same_images_and_have_the_same_checksum():
    first, second = [datasets.load_dataset('digits', 16, 8, train_images=60, validation_steps=2,
                                           share=(index, 2)) for index in range(2)]
    assert first.steps == second.steps == 3 and first.num_images == second.num_images == 30
    assert first.fingerprint == second.fingerprint
    for (images, labels), (others, same) in zip(first.test, second.test):
        assert (images.numpy() == others.numpy()).all() and (labels.numpy() == same.numpy()).all()


def test_class_weights_are_those_of_all_images():
    weights = [datasets.find_images('digits', 16, 8, share=(index, 2), train_images=60,
                                    class_weight='balanced').class_weights for index in range(2)]
    assert weights[0] == weights[1]


def test_a_batch_larger_than_a_worker_s_part_is_refused():
    with pytest.raises(UserError, match='a batch of 16 does not fit into the 15 training images of '
                                        'digits that each of the 4 workers has'):
        datasets.find_images('digits', 16, 16, share=(3, 4), train_images=60)
