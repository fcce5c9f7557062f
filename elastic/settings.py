"""Defines the settings of a run, with the defaults of every command line.

Imports nothing heavy: `--help` and a wrong flag answer at once. flags.py explains each setting.
"""

import os
from typing import NamedTuple, Optional, Tuple

LOGS_DIR = 'logs'
AUGMENTATIONS = ('flip', 'flip+rotate', 'none')
VIEWS = ('auto', 'fresh', 'held')
KEPT = ('last', 'best')  # the epoch whose weights are kept
HEADS = LAST, STAGES = 'last', 'stages'  # what the output layer reads
STARTS = RANDOM, SOLVED = 'random', 'solved'  # the output layer before training
BASELINES = ('full_training', 'traditional_tl_training', 'bn_plus_bias_training')
ELASTIC, PRUNE, CHOSEN = 'elastic_training', 'prune_training', 'chosen_tensors'
PAPER_SETS = {  # the paper's: classes, training images, test images
    'caltech_birds2011': (200, 5994, 5794), 'oxford_iiit_pet': (37, 3680, 3669),
    'stanford_dogs': (120, 12000, 8580)}


class ModelSettings(NamedTuple):
    """Says how models.build_model makes a network."""
    model_name: str = 'resnet50'
    input_size: int = 224
    weights: str = 'imagenet'
    alpha: float = 1.0
    bn_statistics: Optional[str] = None  # None: decided by statistics_of
    trust_model: bool = False
    keep_frozen: bool = False
    head: str = LAST
    head_features: int = 8192
    head_start: str = RANDOM

    @property
    def image_shape(self):
        return self.input_size, self.input_size, 3


def pools(head, head_start):
    """Returns whether the output layer reads standardised features, of networks/stages.py."""
    return (head, head_start) != (LAST, RANDOM)


def statistics_of(weights, bn_statistics=None):
    """Returns `bn_statistics` if given, else 'train' for random weights and 'frozen' for others.

    In an untrained network, frozen statistics make the signal vanish.
    """
    return bn_statistics or ('train' if weights == 'none' else 'frozen')


class Settings(NamedTuple):
    """Says how train.train trains."""
    num_epochs: int = 12
    optimizer: str = 'sgd'
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    weight_decay: float = 5e-4
    clip_norm: Optional[float] = None
    interval: int = 4
    rho: float = 0.533
    head_epochs: int = 0
    deadline: Optional[float] = None  # s, from the start of the process
    importance: str = 'gradient_update'
    probe_batches: int = 1
    closed_loop: bool = True
    granularity: str = 'tensor'
    prune_interval: int = 5
    prune_penalty_ratio: float = 0.2
    prune_threshold: float = 1e-4
    keep: str = KEPT[0]
    patience: Optional[int] = None
    seed: int = 0
    train_type: str = ELASTIC
    train_tensors: Optional[str] = None
    head_start: str = RANDOM

    @property
    def solves(self):
        """Returns whether the first epoch solves the output layer."""
        return self.head_start == SOLVED

    @property
    def first_epochs(self):
        """Returns the number of epochs of the head alone, solved or trained, at the start."""
        return 1 if self.solves else self.head_epochs

    @property
    def trained_epochs(self):
        """Returns the number of epochs that train."""
        return self.num_epochs - self.solves


TRAINING = Settings()  # the defaults


class DataSettings(NamedTuple):
    """Says how datasets.load_dataset reads a data set.

    data_dir: default: TFDS_DATA_DIR or ~/tensorflow_datasets.
    seed: fixes the order of `train` and `probe` and the augmentation, not the split.
    share: (i, n) trains on part i of the images, from 0, of n equal parts.
    """
    data_dir: Optional[str] = None
    seed: int = TRAINING.seed
    steps_per_epoch: Optional[int] = None
    validation_steps: Optional[int] = None
    views: str = VIEWS[0]
    interval: int = TRAINING.interval
    augmentation: Optional[str] = None
    train_images: Optional[int] = None
    test_images: Optional[int] = None
    validation_share: Optional[float] = None
    class_weight: Optional[str] = None
    skip_bad_images: bool = False
    share: Tuple[int, int] = (0, 1)


class WorkerSettings(NamedTuple):
    """Says which workers train together: the flags of workers/addresses.py."""
    workers: Optional[str] = None
    worker_index: Optional[int] = None
    worker_timeout: float = 300.0  # s


class CacheSettings(NamedTuple):
    """Says whether a run has a prefix cache, and where it is stored."""
    prefix_cache: str = 'auto'
    cache_dir: Optional[str] = None
    cache_gb: Optional[float] = None


class RecordSettings(NamedTuple):
    """Says where a run is recorded, and what is kept of it."""
    logs_dir: str = LOGS_DIR
    run_name: str = 'auto'
    checkpoint_minutes: float = 10
    restart: bool = False
    save_model: bool = False
    export: Optional[str] = None
    save_txt: bool = False
    meter_csv: Optional[str] = None

    @property
    def folder(self):
        """Returns the path of the run's folder."""
        return os.path.join(self.logs_dir, self.run_name)

    def aside(self, folder):
        """Returns the settings of a worker whose records go to a temporary folder."""
        return self._replace(logs_dir=folder, save_model=False, export=None, save_txt=False,
                             meter_csv=None)


KINDS = (ModelSettings, DataSettings, Settings, CacheSettings, RecordSettings, WorkerSettings)
DEFAULTS = {name: value for kind in KINDS for name, value in kind()._asdict().items()}
MODEL = ModelSettings()  # the defaults


def settings_of(args, kind):
    """Returns a NamedTuple of class `kind`; each field is the argument of the same name."""
    return kind(**{field: getattr(args, field) for field in kind._fields})


class RunSettings(NamedTuple):
    """Holds all settings of one run of main.py."""
    dataset_name: str
    batch_size: int
    num_classes: Optional[int]
    inter_op_threads: int
    deterministic: bool
    model: ModelSettings
    data: DataSettings
    training: Settings
    cache: CacheSettings
    records: RecordSettings
    workers: WorkerSettings = WorkerSettings()


def run_settings(args):
    """Returns the RunSettings of checked arguments."""
    return RunSettings(args.dataset_name, args.batch_size, args.num_classes, args.inter_op_threads,
                       args.deterministic, *[settings_of(args, kind) for kind in KINDS])
