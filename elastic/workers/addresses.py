"""Says which workers train together, and waits until all of them answer. Needs no TensorFlow."""

import errno
import json
import os
import socket
import time
from typing import NamedTuple, Tuple

from elastic.errors import UserError

EXAMPLE = 'pi1:2222,pi2:2222'
ROLES = ('chief', 'master', 'worker')  # in TF_CONFIG, in order; master is the chief's former name
SECOND = 1.0  # the longest wait for one answer
SAID_AFTER = 3.0  # s of waiting, after which a line says for whom


class WorkerLost(RuntimeError):
    """Says which worker has left or no longer answers. args: the worker; where the run stopped."""

    def __str__(self):
        return ' '.join(self.args) + '; run the same commands on all workers to resume'


class Workers(NamedTuple):
    """Holds the workers of a run and the place of this process among them.

    addresses: 'host:port' of each worker; the first is the chief, which keeps the records.
    """
    addresses: Tuple[str, ...]
    index: int

    def name(self, index):
        """Returns what messages call a worker."""
        return 'worker {} ({})'.format(index, self.addresses[index])

    @property
    def others(self):
        """Returns the indices of the other workers."""
        return [index for index in range(len(self.addresses)) if index != self.index]


def workers_of(args, environment=None):
    """Returns the Workers of --workers and --worker_index, or of TF_CONFIG; None for one process.

    environment: default os.environ. Raises UserError if they make no sense.
    """
    source = '--workers'
    addresses, index = args.workers and args.workers.split(','), args.worker_index
    if addresses is None:
        text = (os.environ if environment is None else environment).get('TF_CONFIG')
        if text and text.strip() and index is None:
            source = 'TF_CONFIG'
            addresses, index = _of_tf_config(text)
        elif index is not None:
            raise UserError('--worker_index {} needs --workers, such as {}'.format(index, EXAMPLE))
    if addresses is None:
        return None
    for address in addresses:
        split_address(address, source)
    if len(set(addresses)) < len(addresses):
        raise UserError('{} {} names an address twice; give each worker its own'.format(
            source, ','.join(addresses)))
    if index is None:
        raise UserError('--workers needs --worker_index, which says which of them this machine is; '
                        'allowed: 0 to {}'.format(len(addresses) - 1))
    if not 0 <= index < len(addresses):
        raise UserError('--worker_index {} is none of the {} workers; allowed: 0 to {}'.format(
            index, len(addresses), len(addresses) - 1))
    return Workers(tuple(addresses), index) if len(addresses) > 1 else None


def _of_tf_config(text):
    """Returns (addresses, index) of TF_CONFIG; (None, None) if it names no other machine."""
    try:
        config = json.loads(text)
        cluster, task = config.get('cluster') or {}, config.get('task') or {}
        kind = task.get('type')
        if kind == 'evaluator':
            raise UserError('TF_CONFIG makes this machine an evaluator, which does not train: '
                            'start the others alone, they test after each epoch')
        jobs = {job: list(machines) for job, machines in cluster.items() if job != 'evaluator'}
        if not jobs or list(jobs) == [kind] and len(jobs[kind]) == 1:
            return None, None
        unknown = sorted(set(jobs) - set(ROLES))
        if unknown:
            raise UserError("TF_CONFIG has jobs '{}'; allowed: {}".format(
                "', '".join(unknown), ', '.join(ROLES)))
        addresses = [address for job in ROLES for address in jobs.get(job, [])]
        machines, index = jobs[kind], int(task['index'])
        if not 0 <= index < len(machines):
            raise IndexError('there is no {} {}; allowed: 0 to {}'.format(
                kind, index, len(machines) - 1))
        return addresses, addresses.index(machines[index])
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError('TF_CONFIG is not as TensorFlow defines it ({}: {}); unset it, or use '
                        '--workers'.format(type(error).__name__, error))


def tables_folder(logs_dir, index):
    """Returns the folder for the timing tables of a worker, since all may share `logs_dir`.

    index: of the worker; None for one process.
    """
    return os.path.join(logs_dir, 'worker{}'.format(index)) if index else logs_dir


def split_address(address, source='--workers'):
    """Returns (host, port) of 'host:port'; raises UserError for anything else."""
    host, _, port = address.strip().rpartition(':')
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError("{} has '{}'; needed is host:port, such as {}".format(
            source, address, EXAMPLE))
    return host.strip('[]'), int(port)


def check_own_address(workers):
    """Raises UserError unless this process can listen at its own address."""
    name = workers.name(workers.index)
    host, port = split_address(workers.addresses[workers.index])
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        _listening(found[0], found[4]).close()
    except socket.gaierror:
        raise UserError("{}: the host '{}' is unknown here; use its IP address".format(name, host))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError('{} is not an address of this machine; --worker_index says which of '
                            '--workers it is'.format(name))
        raise UserError('{}: its port cannot be used ({}); stop what uses it, perhaps a second '
                        'process with this --worker_index, or choose another port'.format(
                            name, error.strerror))


def wait_for_all(workers, timeout):
    """Returns once every other worker answers.

    timeout: seconds. Raises UserError with the name of the first worker that does not.
    """
    begin, missing, said = time.monotonic(), workers.others, False
    host, port = split_address(workers.addresses[workers.index])
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with _listening(family, ('', port)):  # for the others to find
        while True:
            missing = [index for index in missing if _failure(workers.addresses[index])]
            if not missing:
                return
            waited = time.monotonic() - begin
            if waited > SAID_AFTER and not said:
                print('waiting for {}'.format(', '.join(map(workers.name, missing))), flush=True)
                said = True
            if waited > timeout:
                raise UserError('{} does not answer after {:g} s: start it there with the same '
                                'flags and --worker_index {}, or check its address and firewall'
                                .format(workers.name(missing[0]), timeout, missing[0]))
            time.sleep(0.1)


def refuses(address):
    """Returns whether no process listens at this 'host:port', though its machine answers."""
    return isinstance(_failure(address), ConnectionRefusedError)


def _failure(address):
    """Returns why nothing answers at this 'host:port', an OSError; None if something does."""
    try:
        socket.create_connection(split_address(address), SECOND).close()
        return None
    except OSError as error:
        return error


def _listening(family, address):
    """Returns a socket that listens at this address."""
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    return listener
