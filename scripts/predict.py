"""Prints the most likely classes of photos.

    python scripts/predict.py RUN PHOTO [PHOTO ...]
    python scripts/predict.py model.tflite FOLDER --csv predictions.csv
    find . -name '*.jpg' | python scripts/predict.py RUN -

RUN is a run that saved its model, a saved Keras model, or a LiteRT file. The last needs no
TensorFlow: NumPy, Pillow and ai-edge-litert do. A folder stands for all images in it, `-` for a
list of paths on standard input, one a line.
"""

import argparse
import collections
import os
import sys

import numpy as np

import _root
from elastic import command_line
from elastic.data.photo import images_among, left_out_note, read_image
from elastic.errors import UserError
from elastic.export.predictor import AT_ONCE, check_names, open_predictor
from elastic.files import check_writable, make_folder, printable, write_table
from elastic.options import as_path, number
from elastic.runs.folder import run_folder


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description='Prints the most likely classes of photos.')
    parser.add_argument('model', type=as_path, metavar='RUN',
                        help='a run, a saved Keras model or a LiteRT file')
    parser.add_argument('photos', nargs='+', type=as_path, metavar='PHOTO',
                        help='images, folders of images, or - for a list on standard input')
    parser.add_argument('--top', type=number(int, low=1), default=5, metavar='N',
                        help='classes to show for each photo (default: %(default)s)')
    parser.add_argument('--csv', type=as_path, metavar='FILE',
                        help='also write all probabilities, one row per photo')
    _root.add_model_flags(parser)
    return parser.parse_args(argv)


def raised(error):
    raise error  # else os.walk passes over a folder that cannot be read


def paths_of(photos):
    """Returns the paths of all photos; raises UserError if one is missing or a folder is empty."""
    found = []
    for photo in photos:
        if photo == '-':
            found += paths_of(filter(None, os.fsdecode(sys.stdin.buffer.read()).split('\n')))
        elif os.path.isdir(photo):
            left_out = collections.Counter()
            files = [os.path.join(folder, name) for folder, _, names in sorted(
                os.walk(photo, onerror=raised)) for name in sorted(names)]
            inside = images_among([file for file in files if os.sep + '.' not in os.sep
                                   + os.path.relpath(file, photo)], left_out)  # hidden
            if left_out:
                print('{}: {}'.format(printable(photo), left_out_note(left_out)), file=sys.stderr)
            if not inside:
                raise UserError("no images in folder '{}'".format(photo))
            found += inside
        elif os.path.isfile(photo):
            found.append(photo)
        else:
            raise UserError("no photo at '{}'".format(photo))
    return found


def predictions(model, paths):
    """Yields (path, (C,) probabilities) of each photo, or (path, the reason why it is unread)."""
    for begin in range(0, len(paths), AT_ONCE):
        batch, images = [], []
        for path in paths[begin:begin + AT_ONCE]:
            try:
                images.append(read_image(path, model.input_size))
                batch.append((path, None))
            except ValueError as error:
                batch.append((path, str(error)))
        rows = iter(model.probabilities(np.array(images, np.float32)) if images else ())
        for path, fault in batch:
            yield path, next(rows) if fault is None else fault


def main(argv=None):
    args = parse_arguments(argv)
    if args.csv:
        check_writable(args.csv, '--csv')
    paths = paths_of(args.photos)
    model = open_predictor(run_folder(args.model, args.logs_dir), args.input_size,
                           args.trust_model)
    names, rows, bad = model.class_names, [], 0
    width = max(len(printable(path)) for path in paths)
    for path, found in predictions(model, paths):
        if isinstance(found, str):
            print("cannot read image '{}': {}".format(printable(path), found), file=sys.stderr)
            bad += 1
            continue
        check_names(names, len(found))
        names = names or ['class {}'.format(i) for i in range(len(found))]
        best = np.argsort(-found, kind='stable')[:args.top]
        print('{:{}}  {}'.format(printable(path), width, '  '.join(
            '{} {:.1f} %'.format(names[i], 100 * found[i]) for i in best)))
        rows.append([printable(path), names[best[0]]] + ['{:.6g}'.format(p) for p in found])
    if args.csv and rows:
        make_folder(os.path.dirname(args.csv) or '.')
        write_table(args.csv, ['photo', 'prediction'] + list(names), rows)
    return 1 if bad else 0


if __name__ == '__main__':
    command_line.run(main)
