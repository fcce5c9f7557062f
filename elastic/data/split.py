"""Holds the numbered images of a split: fetched one by one, chosen by number, or decoded once.

digits.py, image_folder.py and records.py each provide a Split to train on and one to test on.
"""

from typing import Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from elastic.errors import UserError, reason

SPLIT_SEED = 1797  # fixed, unlike a run's seed, so that every run tests on the same images
DECODED_AT_ONCE = 32  # images; one by one, tf.data's overhead would exceed decoding a small image


class Split(NamedTuple):
    """Holds the training images or the test images of a data set, numbered from 0.

    input_size: S, pixels; images are (S, S, 3) uint8.
    labels: () -> (size,) int32, without decoding an image.
    size: number of images.
    fetch: image number, () int64 -> image; runs in a graph.
    files: paths of a user's images, None for other images; () if there are no paths.
    kept: whether the images are in memory; `fetch` then takes an array of numbers.
    names: what records call the images: paths within the user's folder; None: their numbers.
    sources: name, in one Unicode form -> path, of every file of the data set, chosen or not.
    old: how many of the images, the last ones, earlier runs have kept (replay.py).
    old_share: what share of the images in each batch they should be.
    """
    input_size: int
    labels: Callable
    size: int
    fetch: Callable
    files: Sequence[Optional[str]] = ()
    kept: bool = False
    names: Optional[Sequence[str]] = None
    sources: Mapping[str, str] = {}
    old: int = 0
    old_share: float = 0.0

    def named(self):
        """Returns `names`, or the numbers as text, before any were chosen."""
        return self.names or [str(number) for number in range(self.size)]

    def only(self, chosen):
        """Returns the Split of the images with these numbers, (n,) int64, in that order."""
        def fetch(index):
            import tensorflow as tf
            return self.fetch(tf.gather(chosen, index))
        names = self.named()
        return self._replace(
            size=len(chosen), fetch=fetch, labels=lambda: self.labels()[chosen],
            files=self.files and [self.files[i] for i in chosen], names=[names[i] for i in chosen],
            old=int(np.sum(np.asarray(chosen) >= self.new)))

    def joined(self, old, share):
        """Returns the Split of these images and then of those in the Split `old`.

        share: as old_share.
        """
        def fetch(index):
            import tensorflow as tf
            return tf.cond(index < self.size, lambda: self.fetch(index),
                           lambda: old.fetch(index - self.size))
        return self._replace(
            size=self.size + old.size, fetch=fetch,
            labels=lambda: np.concatenate([self.labels(), old.labels()]),
            files=(self.files or [None] * self.size) + old.files, names=self.named() + old.named(),
            old=old.size, old_share=share)

    @property
    def new(self):
        """Returns the number of images that no earlier run has kept; they come first."""
        return self.size - self.old

    @property
    def _drawn(self):
        """Returns how many old images an epoch shows."""
        return max(1, int(round(self.new * self.old_share / (1 - self.old_share)))) * (self.old > 0)

    @property
    def epoch_size(self):
        """Returns the number of images that an epoch shows, as `order` says."""
        return self.new + self._drawn

    def order(self, rng):
        """Returns the numbers of the images of an epoch, (epoch_size,) int64, in a random order.

        An epoch shows each new image once, and evenly between them as many old ones as their share
        asks: other ones in each epoch, or each several times, where there are fewer.
        rng: np.random.RandomState.
        """
        found = rng.permutation(self.new)
        if self.old:
            places = np.arange(self.epoch_size + 1) * self._drawn // self.epoch_size
            found = np.insert(found, np.flatnonzero(np.diff(places)) - np.arange(self._drawn),
                              self.new + np.resize(rng.permutation(self.old), self._drawn))
        return found

    def counts(self, classes):
        """Returns how many images of each class an epoch shows on average, (classes,)."""
        new, old = [np.bincount(labels, minlength=classes)
                    for labels in np.split(self.labels(), [self.new])]
        return new + old * self._drawn / self.old if self.old else new

    def relabelled(self, numbers):
        """Returns the Split in which class c is called numbers[c]. numbers: (C,) int32."""
        return self._replace(labels=lambda: numbers[self.labels()])

    def spaced(self, count):
        """Returns the Split of `count` evenly spaced images."""
        if count == self.size:
            return self
        return self.only(np.linspace(0, self.size - 1, count).round().astype(np.int64))

    def subset(self, count, what):
        """Returns the Split of `count` images, equally many of each class if there are enough.

        The choice depends on no seed, and a larger subset contains every smaller one.
        what: the images, for the UserError if `count` is out of range.
        """
        labels, shuffled = self.labels(), np.random.RandomState(SPLIT_SEED).permutation(self.size)
        classes = np.unique(labels)
        if not len(classes) <= count <= self.size:
            raise UserError('{} {} cannot be chosen; allowed: {} (one of each class) to {} (all)'
                            .format(count, what, len(classes), self.size))
        rank = np.empty(self.size, np.int64)  # within its class: first all images of rank 0
        for label in classes:
            members = shuffled[labels[shuffled] == label]
            rank[members] = np.arange(len(members))
        return self.only(np.sort(shuffled[np.argsort(rank[shuffled], kind='mergesort')][:count]))

    def parted(self, share):
        """Returns the Splits of 1 - share and of `share` of the images; see `stratified`."""
        return tuple(map(self.only, stratified(self.labels(), share)))

    def part(self, index, count):
        """Returns the Split of part `index`, from 0, of `count` parts of equal size.

        Images that are next to each other are in different parts, as they are often of one class.
        """
        whole = self.size - self.size % count
        return self if count == 1 else self.only(np.arange(index, whole, count))

    def decoded(self, keep, title):
        """Returns the Split with its images in memory if `keep`, else itself.

        A user's files are decoded in any case, so that a damaged one raises UserError before
        training starts. title: of the progress bar.
        """
        if not keep and not self.files:
            return self
        import tensorflow as tf
        from tqdm import tqdm
        shape = (self.size if keep else 0, self.input_size, self.input_size, 3)
        images, done = np.empty(shape, np.uint8), 0
        batches = untuned(tf.data.Dataset.range(self.size).map(self.fetch, 2).batch(
            DECODED_AT_ONCE).prefetch(2))
        try:  # disable=None: no bar outside a terminal
            with tqdm(None, title, self.size, False, unit='image', disable=None, delay=1) as bar:
                for some in batches:
                    if keep:
                        images[done:done + len(some)] = some
                    done += len(some)
                    bar.update(len(some))
        except tf.errors.OpError as error:  # batches come in order: the failing one starts at done
            from elastic.data.photo import check_readable
            check_readable(self.files[done:], self.input_size)
            raise UserError("cannot read image 'number {} of {}' ({}); prepare the data set "
                            'again'.format(done, title, reason(error)))
        if not keep:
            return self
        # From a NumPy array: tf.data copies a captured tensor of this size at each iteration.
        return self._replace(kept=True, fetch=lambda indices: tf.numpy_function(
            lambda i: images[i], [indices], tf.uint8))


def stratified(labels, share):
    """Returns the numbers, in order, of 1 - share and of `share` of the images of each class.

    labels: (n,) int. The choice depends on no seed. A class of two or more images is in both parts;
    a single image is in the first.
    """
    rng, chosen = np.random.RandomState(SPLIT_SEED), np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, int(round(share * len(members)))), len(members) - 1)
        chosen[members[rng.permutation(len(members))[:count]]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def fitted(image, input_size):
    """Returns an image of 1 to 4 channels, uint8, as (S, S, 3) uint8.

    Repeats a grey channel and drops transparency. uint8 needs a quarter of the memory of float32.
    """
    import tensorflow as tf
    image = tf.cond(tf.shape(image)[-1] < 3, lambda: tf.tile(image[..., :1], [1, 1, 3]),
                    lambda: image[..., :3])
    image = tf.image.resize(tf.ensure_shape(image, (None, None, 3)), (input_size, input_size))
    return tf.cast(tf.round(image), tf.uint8)


def untuned(data):
    """Returns the tf.data without autotuning, whose thread can delay the end of a pass by 10 s."""
    import tensorflow as tf
    options = tf.data.Options()
    if hasattr(options, 'autotune'):
        options.autotune.enabled = False
    else:  # TensorFlow 2.6
        options.experimental_optimization.autotune = False
    return data.with_options(options)
