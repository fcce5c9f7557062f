"""Tests a trained network on the test images of a data set, and says which classes it knows.

    python scripts/evaluate.py RUN
    python scripts/evaluate.py model.tflite --dataset_name folder:PATH --output figures/NAME

The model is a run that saved its model, a saved Keras model, or a LiteRT file. It must have the
classes of the data set; their order may differ.
"""

import argparse
import os

import numpy as np

import _root
from elastic import command_line
from elastic.compat import start
from elastic.data.class_names import matches
from elastic.data.image_folder import without_bad_images
from elastic.data.images import check_dataset_name, load_images
from elastic.data.photo import check_readable
from elastic.data.photo_list import changes
from elastic.errors import UserError
from elastic.export.predictor import AT_ONCE, check_names, open_predictor
from elastic.figures.confusion import draw_confusion
from elastic.files import check_writable, make_folder, read_json
from elastic.options import add_flag, as_path
from elastic.runs.classes import Predictions, report, write_predictions
from elastic.runs.folder import run_folder
from elastic.settings import DataSettings
from elastic.texts import shortened

SMALLEST = 1e-7  # bounds the loss of one image where rounding made a probability 0, as Keras does


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description='Tests a trained network on the test images of a data set.')
    parser.add_argument('model', type=as_path, metavar='MODEL',
                        help='a run, a saved Keras model or a LiteRT file')
    parser.add_argument('--dataset_name', metavar='NAME',
                        help="as for main.py (default: a run's own)")
    parser.add_argument('--data_dir', type=as_path, metavar='DIR',
                        help="folder of TensorFlow Datasets (default: a run's own)")
    parser.add_argument('--csv', type=as_path, metavar='FILE',
                        help='also write the prediction for each image')
    parser.add_argument('--output', type=as_path, metavar='figures/NAME',
                        help='also draw the confusion matrix, as `plot.py confusion`')
    _root.add_model_flags(parser)
    add_flag(parser, '--skip_bad_images', 'leave out images of a folder that cannot be read')
    return parser.parse_args(argv)


def data_of(args, path):
    """Returns the data set's name and DataSettings, from the flags or from the run at `path`.

    A run that continued another has its classes: its data may have only some.
    """
    summary = os.path.join(path, 'summary.json')
    own = read_json(summary) if os.path.exists(summary) else {}
    if not os.path.exists(path):
        raise UserError("no run or model at '{}'".format(path))
    name = args.dataset_name or own.get('dataset_name')
    if name is None:
        raise UserError("'{}' is no finished run, which would name its data set: give "
                        '--dataset_name'.format(args.model))
    known = own['class_names'] if own.get('run_before') and args.dataset_name is None else ()
    return check_dataset_name(name), DataSettings(
        args.data_dir or own.get('data_dir'), old_classes=tuple(known))


def order_of(model, class_names, title):
    """Returns the outputs of the model in the order of class_names: (C,) int.

    title: of the data set. Raises UserError if the model has other classes.
    """
    blank = np.zeros((1, model.input_size, model.input_size, 3), np.float32)
    outputs, names = model.probabilities(blank).shape[1], model.class_names
    check_names(names, outputs)
    if names is None:
        if outputs != len(class_names):
            raise UserError('the model has {} outputs, {} has {} classes'.format(
                outputs, title, len(class_names)))
        print('the model has no class names: assuming the order of {} ({})'.format(
            title, shortened(class_names)))
        return np.arange(outputs)
    meant = matches(names, class_names)
    if not len(set(meant.values())) == len(names) == len(class_names):
        parts = [(sorted(set(names).difference(meant)), 'only the model has {}'),
                 (sorted(set(class_names).difference(meant.values())), 'only the data set has {}')]
        raise UserError('the model has {} classes, {} has {}; {}'.format(
            len(names), title, len(class_names),
            '; '.join(text.format(shortened(only)) for only, text in parts if only)))
    order = [meant[name] for name in names]
    return np.array([order.index(name) for name in class_names])


def probabilities_of(model, test):
    """Returns the labels, (n,) int, and probabilities, (n, C), of the test Split."""
    import tensorflow as tf
    from tqdm import tqdm

    from elastic.data.batches import in_order
    labels, probabilities = [], []
    try:
        with tqdm(None, 'test', test.size, False, unit='image', disable=None) as bar:
            for images, some in in_order(test, AT_ONCE):
                labels.append(some.numpy())
                probabilities.append(model.probabilities(images.numpy()))
                bar.update(len(some))
    except tf.errors.OpError:
        check_readable(test.files, test.input_size)
        raise
    return np.concatenate(labels), np.concatenate(probabilities)


def main(argv=None):
    args = parse_arguments(argv)
    for flag, output in (('--csv', args.csv), ('--output', args.output and args.output + '.png')):
        if output:
            check_writable(output, flag)
    path = run_folder(args.model, args.logs_dir)
    name, data = data_of(args, path)
    model = open_predictor(path, args.input_size, args.trust_model)
    start.quiet_tensorflow()
    images = load_images(name, model.input_size, data)
    order = order_of(model, images.class_names, name)
    changed = args.dataset_name is None and changes(path, images.photos)
    if changed:
        print('warning: the images have changed since the run ({}), which may have been trained on '
              'some of the test images'.format(changed))
    test, left_out = without_bad_images(images.test) if args.skip_bad_images else (images.test, [])
    labels, probabilities = probabilities_of(model, test)
    probabilities = probabilities[:, order]
    loss = -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], SMALLEST)).mean()
    predictions = Predictions(images.class_names, test.named(), labels,
                              probabilities.argmax(axis=1), probabilities.max(axis=1))
    print('{} on {}: loss {:.4f}'.format(args.model, name, loss))
    if left_out:
        print('{} images could not be read; the next one counts instead, as in a run'.format(
            len(left_out)))
    print('\n'.join(report(predictions)))
    if args.csv:
        make_folder(os.path.dirname(args.csv) or '.')
        write_predictions(args.csv, predictions)
    if args.output:
        print('\n'.join(draw_confusion(predictions, '{} on {}'.format(args.model, name), name,
                                       args.output)))
    return 0


if __name__ == '__main__':
    command_line.run(main)
