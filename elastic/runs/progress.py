"""Reports a run while it trains: on the terminal, in its records, and in its summary."""

import numpy as np

from elastic.compat import keras_stack
from elastic.data.class_weights import weights_table
from elastic.device.host import memory_limit
from elastic.device.sensors import NO_ANSWER
from elastic.files import printable
from elastic.networks.saved_model import count_trainable
from elastic.runs.folder import judged_on
from elastic.runs.signals import stopping_if_unread
from elastic.texts import size_text

CLASSES_SHOWN = 10  # in the last lines of a run


def summary_of(tally, clock, scheme, cache, outcome):
    """Returns the measured part of summary.json, a dict.

    tally: Tally of the epochs. scheme, cache: as in run.Run. outcome: of its judge.
    """
    found = dict(
        epochs=tally.epochs, throttled_epochs=tally.throttled, step_ms=tally.step_ms,
        train_seconds=clock.train_seconds, importance_seconds=scheme.importance_seconds,
        **{bucket + '_seconds': seconds for bucket, seconds in clock.seconds.items()},
        **outcome, **scheme.summary)
    if cache.totals:
        found.update(cache.totals, **{kind + '_step_ms': ms for kind, ms in tally.medians.items()})
    return found


def record_epoch(recorder, scheme, choice, row, result, cache):
    """Records one epoch; choice: made before it, or None. row: dict of folder.epoch_columns."""
    if choice is not None:
        _record_choice(recorder, scheme.maker.model, choice, row['epoch'])
    recorder.epoch(row)
    if scheme.name.startswith('elastic'):
        recorder.elastic({'step_ms': row['step_ms'], 'wait_ms': result.wait_ms}, row['epoch'])
    if cache.totals:
        totals, tried = cache.totals, cache.totals['cache_hits'] + cache.totals['cache_misses']
        share = totals['cache_hits'] / max(1, tried)
        recorder.elastic(dict(totals, cache_share_read=share), row['epoch'])


def _record_choice(recorder, model, choice, epoch):
    variables, timings = model.trainable_variables, choice.timings
    recorder.selection(epoch, [keras_stack.variable_name(v) for v in variables],
                       [tuple(v.shape) for v in variables], choice.mask, choice.importance,
                       choice.time_share)
    if choice.importance is not None:
        recorder.elastic({
            'selected_tensors': int(choice.mask.sum()),
            'selected_importance': float(choice.importance[choice.mask].sum()),
            'predicted_step_ms': choice.predicted_ms, 'full_step_ms': timings.t_step,
            'forward_ms': timings.t_fp, 'backward_ms': timings.t_bp, 'loop_ms': timings.t_loop,
            'share_drift': choice.drift, 'fallback': int(choice.fallback)}, epoch)
    if choice.trials:
        means = zip(choice.trials[0]._fields, np.mean(choice.trials, axis=0))
        recorder.elastic({'trial_' + field: mean for field, mean in means}, epoch)


@stopping_if_unread()
def announce(choice, settings, seconds, cache):
    """Prints what was selected, how long it took, and warnings."""
    tensors = f'{choice.mask.sum()} of {len(choice.mask)} tensors'
    cost = '' if choice.timings is None else (
        f'{choice.predicted_ms:.1f} ms/step predicted = '
        f'{choice.predicted_ms / choice.timings.t_step:.2f} of full')
    if choice.importance is None:
        print(f'training {tensors}' + (cost and f': {cost}'))
    else:
        positive = choice.importance[choice.importance > 0].sum()
        percent = 100 * choice.importance[choice.mask].sum() / max(positive, 1e-12)
        left = f'; {choice.rho:.2f} left' if abs(choice.rho - settings.rho) >= 0.005 else ''
        print(f'selected {tensors}: {percent:.0f} % of the importance, {cost} '
              f'(rho {settings.rho:g}{left}), in {seconds:.2f} s')
    for line in cache.lines(choice.timings):
        print('  ' + line)
    if any(trial.scale < 1 for trial in choice.trials):
        print('  a full trial update overshoots: importance measured at {:g} of it'.format(
            min(trial.scale for trial in choice.trials)))
    if choice.trials and not choice.trials[-1].holds:
        print('  warning: even {:g} of an update does not lower the loss as its gradient predicts '
              '({:+.2g} predicted, {:+.2g} measured): importances are unreliable; use a smaller '
              '--learning_rate'.format(*choice.trials[-1]))
    if choice.fallback:
        print('  no affordable tensor has positive importance: training the least negative ones; '
              'a smaller --learning_rate or more --probe_batches may help')


def epoch_label(epoch, num_epochs):
    """Returns a text like 'epoch  3/12'."""
    return 'epoch {:>{}}/{}'.format(epoch, len(str(num_epochs)), num_epochs)


@stopping_if_unread()
def print_epoch(row, num_epochs):
    """Prints the line of one epoch; row: dict of folder.epoch_columns."""
    label, images = epoch_label(row['epoch'], num_epochs), judged_on(row)
    penalty = f"  penalty {row['train_penalty']:.3f}" if row['train_penalty'] else ''
    throttled = '   throttled' if row['throttled'] else ''
    print(f"{label}   train {100 * row['train_accuracy']:5.1f} %  loss {row['train_loss']:6.3f}"
          f"{penalty}   {images} {100 * row[images + '_accuracy']:5.1f} %  "
          f"loss {row[images + '_loss']:6.3f}   {row['step_ms']:7.1f} ms/step   "
          f"{row['train_seconds']:7.1f} s trained{throttled}")


def print_start(settings, dataset, model, resumed):
    """Prints what is trained, on which data, and from where it resumes."""
    tensors = len(model.trainable_variables)
    if settings.model.keep_frozen:
        tensors = '{} of {}'.format(tensors, count_trainable(model))
    print(f'{settings.records.run_name}: {settings.model.model_name} on {settings.dataset_name}, '
          f'{dataset.train_size} images, {tensors} tensors')
    for note in dataset.notes:
        print(note)
    if dataset.class_weights:
        print(weights_table(dataset.class_weights))
    if resumed is not None:
        progress = resumed['run']['progress']
        print('resumes in epoch {} after step {}'.format(
            resumed['run']['epoch'], progress['count'] if progress else 0))


def print_end(summary, dataset):
    """Prints how the run ended, and which output is which class. summary: of summary.json."""
    names = summary['class_names']
    shown = names[:CLASSES_SHOWN]
    if len(names) > CLASSES_SHOWN:
        shown.append(f'... (all {len(names)} in summary.json)')
    print('classes in the order of the outputs: ' + ', '.join(shown))
    if dataset.left_out:
        left_out = ', '.join(map(printable, dataset.left_out[:10]))
        print(f'{len(dataset.left_out)} images could not be read and were left out: {left_out}')
    limit, peak = memory_limit(), 1.024 ** 2 * 1e6 * summary['peak_memory_mb']
    if limit is not None and peak > limit:
        print(f'warning: the process took {size_text(peak)}, more than --memory '
              f'{size_text(limit)}: leave it that much more')
    for note in (summary['device_note'], summary['energy_note']):
        if note is not None and NO_ANSWER in note:
            print(f'not recorded: {note}')
    if summary['best_accuracy'] is None:
        beside = (f"epoch {summary['kept_epoch']}, "
                  f"validation {100 * summary['validation_accuracy']:.1f} %")
    else:
        beside = f"best {100 * summary['best_accuracy']:.1f} %"
    joules = summary['energy_joules']
    energy = '' if joules is None else f', {joules:,.0f} J'
    print(f"final test accuracy {100 * summary['final_accuracy']:.1f} % ({beside}), trained in "
          f"{summary['train_seconds']:.1f} s (selection {summary['selection_seconds']:.1f} s)"
          + energy)
