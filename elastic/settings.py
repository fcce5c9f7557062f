"""Declares each setting of a run once: its default, and the flag that sets it.

Imports nothing heavy: `--help` and a wrong flag answer at once.
"""

import os
from typing import NamedTuple, Optional, Tuple

from elastic.options import Flag, as_path, number
from elastic.texts import count_or_size, duration, size

LOGS_DIR = 'logs'
AUGMENTATIONS = ('flip', 'flip+rotate', 'none')
VIEWS = ('auto', 'fresh', 'held')
KEPT = ('last', 'best')  # the epoch whose weights are kept
HEADS = LAST, STAGES = 'last', 'stages'  # what the output layer reads
STARTS = RANDOM, SOLVED = 'random', 'solved'  # the output layer before training
AUTO = 'auto'  # a learning rate found by a test
EXPORTS = ('litert', 'litert_int8')
BASELINES = ('full_training', 'traditional_tl_training', 'bn_plus_bias_training')
ELASTIC, PRUNE, CHOSEN = 'elastic_training', 'prune_training', 'chosen_tensors'
CACHED = 'cached'  # schemes that can have a prefix cache
PAPER_SETS = {  # the paper's: classes, training images, test images
    'caltech_birds2011': (200, 5994, 5794), 'oxford_iiit_pet': (37, 3680, 3669),
    'stanford_dogs': (120, 12000, 8580)}


class ModelSettings(NamedTuple):
    """Says how models.build_model makes a network."""
    model_name: Flag(
        as_path, 'resnet50, vgg16, mobilenetv2, vit, efficientnet_lite0, any keras.applications '
        'class, or the path of a saved Keras model', 'NAME') = 'resnet50'
    input_size: Flag(number(int, low=8), 'images are resized to this square', 'PIXELS') = 224
    weights: Flag(
        as_path, 'start from ImageNet, from random weights, or from a .npz of this project or a '
        '.h5 of keras.applications', 'imagenet|none|PATH') = 'imagenet'
    continue_from: Flag(
        as_path, 'train on from this finished run: its network, weights, classes, and flags that '
        'are not given (docs/new_data.md)', 'RUN', label='after {}') = None
    alpha: Flag(number(float, above=0), 'width multiplier of the MobileNet families') = 1.0
    bn_statistics: Flag(  # None: decided by statistics_of
        ('frozen', 'train'),
        'moving statistics of batch normalization: frozen (default), which also turns off dropout '
        'and stochastic depth inside the base, as in the original, or train (default with '
        '--weights none)') = None
    trust_model: Flag(
        bool, 'load a saved model that may hold code, which then runs (a Lambda layer; on Keras 2 '
        'also a SavedModel folder): only where you trust its author', decides=False) = False
    keep_frozen: Flag(
        bool, 'train only the layers of a saved model that were trainable when it was saved '
        '(default: all)') = False
    head: Flag(
        HEADS, 'what the output layer reads: the mean of the last output, as in the paper, or '
        'mean and maximum of the outputs of all stages of the network (docs/head.md); with '
        '--deadline the default is stages', label='head {}') = LAST
    head_features: Flag(
        number(int, low=1), 'with --head stages, read at most N numbers for each image') = 8192
    head_start: Flag(
        STARTS, 'the output layer before training: random weights, or solved in closed form from '
        'one pass over the training images, which is the first epoch',
        label='head_start {}') = RANDOM


def pools(head, head_start):
    """Returns whether the output layer reads standardised features, of networks/stages.py."""
    return (head, head_start) != (LAST, RANDOM)


def solves_head(settings):
    """Returns whether the first epoch solves the head, by Settings or the arguments of main.py."""
    return settings.head_start == SOLVED and (
        settings.continue_from is None or settings.keep_statistics)


def statistics_of(weights, bn_statistics=None):
    """Returns `bn_statistics` if given, else 'train' for random weights and 'frozen' for others.

    In an untrained network, frozen statistics make the signal vanish.
    """
    return bn_statistics or ('train' if weights == 'none' else 'frozen')


class Settings(NamedTuple):
    """Says how train.train trains."""
    num_epochs: Flag(number(int, low=1), 'epochs of training', label='{} epochs') = 12
    optimizer: Flag(
        ('sgd', 'adam'), 'SGD with momentum 0.9, or Adam (recommended for vit), both with '
        'decoupled weight decay') = 'sgd'
    learning_rate: Flag(
        number(float, low=0, word=AUTO), 'the peak; decays to 0 on a cosine; auto, the default '
        'with --deadline: found by a test of rates before training, in seconds',
        label='rate {}') = 1e-4
    warmup_steps: Flag(
        number(int, low=0),
        'raise the learning rate linearly to its peak over the first N steps') = 0
    weight_decay: Flag(number(float, low=0), 'decoupled, times the learning rate') = 5e-4
    clip_norm: Flag(
        number(float, above=0), "clip the norm of each tensor's gradient to X, with every scheme: "
        'helps where the loss stops being finite (default: no clipping)') = None
    micro_batch: Flag(
        number(int, low=1), 'compute each batch N images at a time, in the memory of N, and update '
        'once; N divides --batch_size (default: the whole batch)', label='micro_batch {}') = None
    interval: Flag(
        number(int, low=0), 'epochs from one selection to the next; 0: select only once; also '
        'used by --views', 'EPOCHS', label='interval {}') = 4
    rho: Flag(
        number(float, above=0, high=1), 'step time as a share of full training, 0.5 = twice as '
        'fast; with a prefix cache the mean over the run', of=ELASTIC) = 0.533
    head_epochs: Flag(
        number(int, low=0), 'train the output layer alone in the first N epochs, at the full '
        'learning rate', 'N', of=ELASTIC) = 0
    deadline: Flag(  # s, from the start of the process
        duration, 'train as well as possible until this time after the start of the process, such '
        'as 45m, then stop; solves the head, chooses --rho and --num_epochs, and keeps the best '
        'epoch on a tenth of the training images (docs/deadline.md)') = None
    memory: Flag(  # bytes or AUTO
        size, 'the most that the process may hold, such as 900MB, or auto: what is free less a '
        'tenth; elastic training also selects by it (docs/memory.md)') = None
    importance: Flag(
        list, '{} (default: gradient_update)', 'METRIC', of=ELASTIC, label='{}') = 'gradient_update'
    probe_batches: Flag(
        number(int, low=1), 'batches that each importance is averaged over', of=ELASTIC,
        label='probe_batches {}') = 1
    closed_loop: Flag(
        bool, 'time both passes again at each selection, so that rho holds while the device '
        'changes speed; always off with --deterministic', of=ELASTIC) = True
    granularity: Flag(
        ('tensor', 'layer'), 'select single tensors, or whole layers', of=ELASTIC,
        label='granularity {}') = 'tensor'
    prune_interval: Flag(
        number(int, low=0), 'epochs from one removal of vanished channels to the next; 0: never '
        'remove any', 'EPOCHS', of=PRUNE, label='prune_interval {}') = 5
    prune_penalty_ratio: Flag(
        number(float, above=0, below=1), 'share of the group lasso in loss plus penalty before '
        'training', of=PRUNE, label='prune_penalty_ratio {}') = 0.2
    prune_threshold: Flag(
        number(float, above=0), 'a channel has vanished when all its weights are smaller',
        of=PRUNE, label='prune_threshold {}') = 1e-4
    keep: Flag(
        KEPT, 'end with the weights of the last epoch, or of the best on the validation images',
        label='keep {}') = KEPT[0]
    patience: Flag(
        number(int, low=1), 'end training after N epochs in a row that are no better on the '
        'validation images (default: train all epochs); the learning rate still follows '
        '--num_epochs', label='patience {}') = None
    seed: Flag(
        number(int, low=0), 'fixes data order, augmentation, dropout and new weights') = 0
    keep_statistics: Flag(
        bool, 'keep the sums of --head_start solved (no image; 34 MB for 4,096 features, 134 MB '
        'for 8,192): a run that continues this one solves its head for the images of both',
        label='keep_statistics {}') = False
    train_type: Flag(str, '{}', 'TYPE') = ELASTIC
    train_tensors: Flag(
        str, 'train the tensors whose names match this regular expression, such as '
        "'block7|head|gamma', and no others; their step time is predicted first", 'REGEX',
        label='train_tensors {}') = None
    head_start: str = RANDOM  # of ModelSettings
    continue_from: str = None  # of ModelSettings

    @property
    def solves(self):
        """Returns whether the first epoch solves the output layer."""
        return solves_head(self)

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
    replay_from: folder of the images that the earlier runs kept; None: no image is mixed in.
    share: (i, n) trains on part i of the images, from 0, of n equal parts.
    old_classes: of the run that a run continues; its classes come first.
    """
    data_dir: Flag(as_path, 'folder of TensorFlow Datasets', 'DIR') = None
    seed: int = TRAINING.seed
    steps_per_epoch: Flag(
        number(int, low=1), 'end each epoch after N steps; every epoch has other images (default: '
        'all training images)') = None
    validation_steps: Flag(
        number(int, low=1), 'test on N batches, evenly spaced among the test images (default: '
        'all)') = None
    views: Flag(
        VIEWS, 'fresh: draw new augmentations in every epoch; held: keep those of each image for '
        '--interval epochs (0: for the whole run), with every scheme; auto: held where rho is out '
        'of reach without the prefix cache, else fresh', label='{} views') = VIEWS[0]
    interval: int = TRAINING.interval
    augmentation: Flag(
        AUGMENTATIONS, 'flip: mirror training images left to right at random; flip+rotate: also '
        'rotate them by up to 72 degrees, as in the paper; none: where that changes the class, as '
        "for letters (default: flip; flip+rotate for the paper's sets, none for digits*)",
        label='augmentation {}') = None
    train_images: Flag(
        number(int, low=2), 'train on only N images, the same number of each class where it has '
        'enough, and the same images for every seed and scheme (default: all)',
        label='train_images {}') = None
    test_images: Flag(
        number(int, low=1), 'test on only N images, chosen in the same way (default: all)',
        label='test_images {}') = None
    validation_share: Flag(
        number(float, above=0, below=1), 'set this share of the training images of each class '
        'aside, the same ones for every seed and scheme; they judge each epoch, and the test '
        'images are used once, at the end (default: the test images judge each epoch, as in the '
        'paper)', label='validation_share {}') = None
    class_weight: Flag(
        as_path, 'multiply the loss of each training image by the weight of its class: balanced '
        'gives all classes the same influence; a CSV file has lines of name,weight (default: no '
        'weights)', 'balanced|FILE', label='class_weight {}') = None
    skip_bad_images: Flag(
        bool, 'leave out images of a folder that cannot be read when the run starts; the summary '
        'counts them', decides=False) = False
    replay: Flag(
        count_or_size, 'keep N training images, or this size of them, for runs that '
        '--continue_from this one; with 0, what is learned later may replace what the network knew '
        '(default: 0)', 'N|200MB', label='replay {}') = 0
    replay_share: Flag(
        number(float, above=0, below=1), 'share of kept images in each batch',
        label='replay_share {}') = 0.5
    share: Tuple[int, int] = (0, 1)
    replay_from: Optional[str] = None
    old_classes: Tuple[str, ...] = ()


class WorkerSettings(NamedTuple):
    """Says which workers train together."""
    workers: Flag(
        str, 'train one model on several machines: host:port of each, the same list on all '
        '(default: TF_CONFIG, else this machine alone; docs/workers.md)',
        'pi1:2222,pi2:2222') = None
    worker_index: Flag(
        number(int, low=0), 'which of --workers this machine is, from 0; worker 0 keeps the '
        'records', 'I', decides=False) = None
    worker_timeout: Flag(
        number(float, above=0), 'stop if another worker does not answer for this time; profiling '
        'and preparing images count', 'SECONDS', decides=False) = 300.0


class CacheSettings(NamedTuple):
    """Says whether a run has a prefix cache, and where it is stored."""
    prefix_cache: Flag(
        ('auto', 'on', 'off'), 'compute the frozen layers in front of the trained tensors once for '
        'each image and selection, and reuse their output: auto where images come back unchanged; '
        'on sets --views held', of=CACHED, label='cache {}') = 'auto'
    cache_dir: Flag(
        as_path, 'folder for a prefix cache that does not fit into memory (default: --logs_dir)',
        'DIR', decides=False) = None
    cache_gb: Flag(
        number(float, above=0), 'the most disk that it may take (default: half of what is free)',
        'GB', decides=False) = None


class RecordSettings(NamedTuple):
    """Says where a run is recorded, and what is kept of it."""
    logs_dir: Flag(as_path, 'folder of runs and timing tables', 'DIR', decides=False) = LOGS_DIR
    run_name: Flag(
        str, 'folder under --logs_dir (default: made from model, data and scheme)', 'NAME',
        decides=False) = 'auto'
    checkpoint_minutes: Flag(
        number(float, above=0), 'write a checkpoint at least this often, besides those at the end '
        'of epochs', decides=False) = 10
    restart: Flag(
        bool, 'discard the run of this name, interrupted or finished, and start over',
        decides=False) = False
    save_model: Flag(
        bool, 'save the trained model beside its weights in checkpoint/; a finished run adds it '
        'without training', decides=False) = False
    export: Flag(
        EXPORTS, 'save the model, and a LiteRT (TensorFlow Lite) file in float32, or in int8 '
        'calibrated on training images; a finished run adds them without training',
        decides=False) = None
    save_txt: Flag(
        bool, 'also write epochs.txt, the table of epochs', decides=False) = False
    meter_csv: Flag(
        as_path, 'log of an external power meter, written while training runs: columns timestamp '
        '(seconds since 1970) and watts', 'FILE', decides=False) = None

    @property
    def folder(self):
        """Returns the path of the run's folder."""
        return os.path.join(self.logs_dir, self.run_name)


MODEL = ModelSettings()  # the defaults


def settings_of(args, kind):
    """Returns a NamedTuple of class `kind`; each field is the argument of the same name."""
    return kind(**{field: getattr(args, field) for field in kind._fields})


class RunSettings(NamedTuple):
    """Holds all settings of one run of main.py."""
    dataset_name: Flag(
        str, 'caltech_birds2011, oxford_iiit_pet, stanford_dogs, fashion_mnist, digits, '
        'digits_shifted, digits_inverted, folder:PATH, or tfds:NAME[/CONFIG][:VERSION] for any set '
        'of images and classes in TensorFlow Datasets', 'NAME') = 'caltech_birds2011'
    batch_size: Flag(number(int, low=1), 'images per step') = 4
    num_classes: Flag(
        number(int, low=2), 'must match the data set (default: that of the data set)') = None
    inter_op_threads: Flag(
        number(int, low=0), 'ops that TensorFlow may run at once; 0: one per core, its own choice '
        'and the fastest that we measured') = 0
    deterministic: Flag(
        bool, 'give bit-identical runs for one seed; slower, needs TensorFlow 2.9') = False
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: Settings = Settings()
    cache: CacheSettings = CacheSettings()
    records: RecordSettings = RecordSettings()
    workers: WorkerSettings = WorkerSettings()

    @property
    def at_once(self):
        return self.training.micro_batch or self.batch_size  # images that a step computes at once


KINDS = (ModelSettings, DataSettings, Settings, CacheSettings, RecordSettings, WorkerSettings)
DECLARED = {(kind, name): flag for kind in KINDS + (RunSettings,)
            for name, flag in kind.__annotations__.items() if isinstance(flag, Flag)}
FLAGS = {name: flag for (_, name), flag in DECLARED.items()}
DEFAULTS = {name: getattr(kind(), name) for kind, name in DECLARED}
VARIED = tuple(name for name, flag in FLAGS.items() if flag.label)  # between runs of one scheme


def run_settings(args):
    """Returns the RunSettings of checked arguments."""
    return RunSettings(args.dataset_name, args.batch_size, args.num_classes, args.inter_op_threads,
                       args.deterministic, *[settings_of(args, kind) for kind in KINDS])
