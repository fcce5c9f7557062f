"""Tests names of networks and paths of weights."""

import subprocess
import sys

import pytest

from elastic.errors import UserError
from elastic.networks.names import canonical_name, check_weights
from small_models import ROOT


@pytest.mark.parametrize('given, canonical', [
    ('ResNet50', 'resnet50'), ('VIT', 'vit'), ('NASNETMOBILE', 'NASNetMobile')])
def test_a_name_is_found_in_any_case(given, canonical):
    assert canonical_name(given) == canonical


@pytest.mark.parametrize('typo, meant', [
    ('mobilnetv2', 'MobileNetV2'), ('efficientnet-b0', 'EfficientNetB0')])
def test_a_mistyped_name_is_answered_with_the_nearest_one(typo, meant):
    with pytest.raises(UserError) as error:
        canonical_name(typo)
    assert "unknown model '{}' (did you mean '{}'?)".format(typo, meant) in str(error.value)


def test_names_and_paths_are_checked_without_tensorflow(tmp_path):
    code = ('import sys\n'
            'from elastic.networks import names\n'
            'print(names.canonical_name("ResNet50"), names.canonical_name(sys.argv[1]))\n'
            'try:\n'
            '    names.canonical_name("mine.keras")\n'
            'except names.UserError as error:\n'
            '    print(error)\n'
            'print([name for name in ("tensorflow", "keras") if name in sys.modules])')
    output = subprocess.check_output([sys.executable, '-c', code, str(tmp_path)], cwd=ROOT)
    assert output.decode().splitlines() == [
        'resnet50 {}'.format(tmp_path), "no saved model at 'mine.keras'", '[]']


def test_weights_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match='no weights file at'):
        check_weights(str(tmp_path / 'mine.npz'))
    other = tmp_path / 'mine.txt'
    other.write_text('weights')
    with pytest.raises(UserError, match='is neither a .npz of this project nor a .h5'):
        check_weights(str(other))
