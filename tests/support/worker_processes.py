"""Starts the workers of one run as real processes on this machine."""

import os
import socket
import subprocess
import sys
import tempfile

from small_runs import ROOT

PATH = os.pathsep.join([ROOT, os.path.join(ROOT, 'tests', 'support')])


def free_addresses(count):
    """Returns `count` addresses of this machine with ports that nothing uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(('127.0.0.1', 0))
    addresses = ['127.0.0.1:{}'.format(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def start(*arguments):
    """Returns the Popen of a Python script; output_of reads what it has printed so far."""
    output = tempfile.TemporaryFile()
    process = subprocess.Popen(
        [sys.executable] + [str(each) for each in arguments], cwd=ROOT, stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(os.environ, PYTHONPATH=PATH, PYTHONUNBUFFERED='1', TF_CPP_MIN_LOG_LEVEL='3'))
    process.output = output
    return process


def output_of(process):
    """Returns what a process of `start` has printed so far."""
    descriptor = process.output.fileno()  # whose position the process writes at
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


def workers(addresses, *flags, each=lambda index: ()):
    """Returns the Popen of main.py on each worker. each: index -> further flags of that worker."""
    return [start('main.py', *flags, '--workers', ','.join(addresses), '--worker_index', index,
                  *each(index)) for index in range(len(addresses))]


def ended(processes, seconds=240):
    """Waits for the processes; returns (exit status, output) of each."""
    found = []
    for process in processes:
        found.append((process.wait(timeout=seconds), output_of(process)))
    return found
