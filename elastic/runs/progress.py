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
        recorder.elastic({'trial_' + field: float(np.mean([getattr(t, field)
                                                           for t in choice.trials]))
                          for field in choice.trials[0]._fields}, epoch)


@stopping_if_unread()
def announce(choice, settings, seconds, cache):
    """Prints what was selected, how long it took, and warnings."""
    if choice.importance is None:
        print('training {} of {} tensors{}'.format(
            choice.mask.sum(), len(choice.mask), '' if choice.timings is None else
            ': {:.1f} ms/step predicted = {:.2f} of full'.format(
                choice.predicted_ms, choice.predicted_ms / choice.timings.t_step)))
    else:
        left = abs(choice.rho - settings.rho) >= 0.005
        print('selected {} of {} tensors: {:.0f} % of the importance, {:.1f} ms/step predicted = '
              '{:.2f} of full (rho {:g}{}), in {:.2f} s'.format(
                  choice.mask.sum(), len(choice.mask),
                  100 * choice.importance[choice.mask].sum()
                  / max(choice.importance[choice.importance > 0].sum(), 1e-12),
                  choice.predicted_ms, choice.predicted_ms / choice.timings.t_step, settings.rho,
                  '; {:.2f} left'.format(choice.rho) if left else '', seconds))
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
    penalty = '  penalty {:.3f}'.format(row['train_penalty']) if row['train_penalty'] else ''
    images = judged_on(row)
    print('{}   train {:5.1f} %  loss {:6.3f}{}   {} {:5.1f} %  loss {:6.3f}   '
          '{:7.1f} ms/step   {:7.1f} s trained{}'.format(
              epoch_label(row['epoch'], num_epochs), 100 * row['train_accuracy'],
              row['train_loss'], penalty, images, 100 * row[images + '_accuracy'],
              row[images + '_loss'],
              row['step_ms'], row['train_seconds'], '   throttled' if row['throttled'] else ''))


def print_start(settings, dataset, model, resumed):
    """Prints what is trained, on which data, and from where it resumes."""
    tensors = len(model.trainable_variables)
    if settings.model.keep_frozen:
        tensors = '{} of {}'.format(tensors, count_trainable(model))
    print('{}: {} on {}, {} images, {} tensors'.format(
        settings.records.run_name, settings.model.model_name, settings.dataset_name,
        dataset.train_size, tensors))
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
    shown = names[:CLASSES_SHOWN] + ['... (all {} in summary.json)'.format(len(names))] * (
        len(names) > CLASSES_SHOWN)
    print('classes in the order of the outputs: ' + ', '.join(shown))
    if dataset.left_out:
        print('{} images could not be read and were left out: {}'.format(
            len(dataset.left_out), ', '.join(map(printable, dataset.left_out[:10]))))
    limit, peak = memory_limit(), 1.024 ** 2 * 1e6 * summary['peak_memory_mb']
    if limit is not None and peak > limit:
        print('warning: the process took {}, more than --memory {}: leave it that much more'.format(
            size_text(peak), size_text(limit)))
    joules = summary['energy_joules']
    for note in (summary['device_note'], summary['energy_note']):
        if note is not None and NO_ANSWER in note:
            print('not recorded: {}'.format(note))
    if summary['best_accuracy'] is None:
        beside = 'epoch {}, validation {:.1f} %'.format(
            summary['kept_epoch'], 100 * summary['validation_accuracy'])
    else:
        beside = 'best {:.1f} %'.format(100 * summary['best_accuracy'])
    print('final test accuracy {:.1f} % ({}), trained in {:.1f} s (selection {:.1f} s)'
          .format(100 * summary['final_accuracy'], beside,
                  summary['train_seconds'], summary['selection_seconds'])
          + ('' if joules is None else ', {:,.0f} J'.format(joules)))
