"""Tests that emulate_pi.sh keeps to its board: files, processes, and paths with any characters.

The board here is a made tree with this machine's programs; no Arm processor is emulated.
"""

import os
import subprocess

import pytest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'emulate_pi.sh')
BOARD = 'a board\'s "cache"'
# Makes the tree, and a kernel that has Arm's programs registered. All mounts are in a namespace.
MAKE_BOARD = '''
set -eu
mount -t tmpfs tmpfs /proc/sys/fs/binfmt_misc
echo flags: OCF >/proc/sys/fs/binfmt_misc/qemu-aarch64
touch /proc/sys/fs/binfmt_misc/register
cd "$1/system"
mkdir -p usr etc/ssl/certs proc dev/shm dev/pts home/pi/elastictrainer
for folder in bin sbin lib lib64; do [ ! -L /$folder ] || ln -s usr/$folder $folder; done
mount --bind /usr usr
echo 'root:x:0:0::/:/bin/sh
pi:x:1000:1000::/home/pi:/bin/sh' >etc/passwd
echo 'root:x:0:
pi:x:1000:' >etc/group
chown -R 1000:1000 home/pi
eval "$2"
shift 2
exec "$@"
'''


def namespaces_allowed():
    return os.path.isdir('/proc/sys/fs/binfmt_misc') and os.path.islink('/bin') and (
        subprocess.call(['unshare', '--mount', '--pid', '--fork', 'mount', '-t', 'tmpfs', 'tmpfs',
                         '/mnt'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0)


@pytest.fixture
def board(tmp_path, monkeypatch):
    """Returns a function that runs emulate_pi.sh on a board; returns (status, output, errors)."""
    if os.getuid() or not namespaces_allowed():
        pytest.skip('needs root and namespaces')
    tools = tmp_path / 'tools'
    tools.mkdir()
    for tool in ('mmdebstrap', 'arch-test', 'qemu-aarch64-static', 'update-binfmts'):
        (tools / tool).write_text('#!/bin/sh\nexit 1\n')
        (tools / tool).chmod(0o755)
    (tmp_path / BOARD / 'system').mkdir(parents=True)
    (tmp_path / BOARD / 'emulated_pi.log').write_text('')
    monkeypatch.setenv('PATH', '{}:{}'.format(tools, os.environ['PATH']))
    monkeypatch.setenv('EMULATE_PI', '1')  # whatever the user exports

    def run(*arguments, typed='', changed='', cache=tmp_path / BOARD):
        made = subprocess.run(
            ['unshare', '--mount', 'bash', '-c', MAKE_BOARD, 'bash', str(tmp_path / BOARD), changed,
             SCRIPT, '--cache', str(cache)] + list(arguments),
            input=typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        return made.returncode, made.stdout, made.stderr
    return run


def test_a_board_sees_none_of_this_machines_files_and_processes_and_leaves_none(board, tmp_path):
    outside, mine = tmp_path / 'outside', tmp_path / 'mine'
    outside.mkdir()
    for path in (outside / 'kept', mine):
        path.write_text('mine')
    status, output, errors = board('--shell', typed='''
        sleep 7654321 >/dev/null 2>&1 &
        ls README.md
        kill -0 {} || echo unseen'''.format(os.getpid()), changed='''
        for file in hosts resolv.conf pip.conf; do ln -s {} etc/$file; done
        rm -r home/pi/elastictrainer
        ln -s {} home/pi/elastictrainer'''.format(mine, outside))
    assert (status, output) == (0, 'README.md\nunseen\n'), errors
    assert os.listdir(str(outside)) == ['kept'] and mine.read_text() == 'mine'
    assert (tmp_path / BOARD / 'system' / 'etc' / 'hosts').read_text().startswith('127.0.0.1')
    running = subprocess.run(['ps', '-eo', 'args'], stdout=subprocess.PIPE).stdout
    assert b'sleep 7654321' not in running


def test_a_folder_that_holds_anything_else_is_refused_untouched(board, tmp_path):
    (tmp_path / 'thesis' / 'results').mkdir(parents=True)
    status, _, errors = board(cache=tmp_path / 'thesis')
    assert status == 2 and errors.endswith('has other files in it; give a new folder\n'), errors
    assert os.listdir(str(tmp_path / 'thesis')) == ['results']
